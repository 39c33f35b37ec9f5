"""Lengths that generators of lm-evaluation-harness would never reach, and data that its tasks would fetch."""

import types
from typing import Any

import pytest

from moba_train.errors import UserError

pytest.importorskip("lm_eval")


@pytest.mark.parametrize(
    ("names", "length", "problem"),
    [
        (["ruler_vt"], 4096, "task ruler_vt: its solved example has [0-9]+ tokens .* 500 are possible"),
        (["ruler"], 1024, "task ruler_vt"),
        (["ruler_cwe"], 1024, "task ruler_cwe: its smallest sample .* samples of 1024; give other --lengths"),
        (["ruler_fwe", "ruler_cwe"], 16384, None),
    ],
)
def test_ruler_generators_that_would_never_end_are_refused(names: list[str], length: int, problem: str | None) -> None:
    from moba_train.tools.lm_eval.tasks import check_sample_lengths

    def letters(text: str, **_options: Any) -> Any:
        """A tokenizer of letters."""
        return types.SimpleNamespace(input_ids=text)

    if problem is None:
        check_sample_lengths(names, letters, [length])
        return
    with pytest.raises(UserError, match=problem):
        check_sample_lengths(names, letters, [length])


def test_data_that_a_task_misses_are_fetched_then_and_not_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    from moba_train.tools.lm_eval.tasks import _load

    fetched: list[str] = []
    monkeypatch.setattr(nltk, "download", lambda name, **_options: fetched.append(name))

    def load(names: list[str]) -> dict[str, Any]:
        nltk.download(f"at import of {names[0]}")
        if names == ["needs"] and not fetched:
            raise LookupError("Resource punkt_tab not found")
        return {"tasks": {names[0]: None}}

    manager: Any = types.SimpleNamespace(load=load)
    assert (_load(manager, "plain"), fetched) == ({"tasks": {"plain": None}}, [])
    assert _load(manager, "needs") == {"tasks": {"needs": None}}
    assert fetched[0] == "punkt_tab"
