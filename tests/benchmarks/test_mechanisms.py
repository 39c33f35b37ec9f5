"""The mechanisms benchmark runs every kind or says why not, and its table holds what was measured."""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import mechanisms, mechanisms_table
from benchmarks.mechanism_peers import PEERS
from benchmarks.mechanisms import Row, measured, model_of_one_layer, on_cpu
from benchmarks.mechanisms_table import MARKER, compared, render
from benchmarks.record import END
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = model_of_one_layer(32, 4, 2, 8)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["mechanisms.py", *arguments])
    mechanisms.main()


def kind_of(text: str) -> LayerAttention:
    attention = Row.parse(text).attention
    assert attention is not None
    return attention


def times(both: float, peak: float | None = None) -> dict[str, Any]:
    spread = {"median": both, "min": both, "max": both, "count": 1}
    return {"forward_ms": {**spread, "median": both / 3}, "both_ms": spread, **({"peak_gib": peak} if peak else {})}


def test_every_kind_runs_or_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    chosen = "moba:always=[first,current],block_size=64,topk=3"
    rows = [*KINDS, chosen]
    run(monkeypatch, "--quick", "--kinds", *rows, "--lengths", "256", "--output", str(output))
    results = json.loads(output.read_text())["results"]
    assert [result["row"] for result in results] == rows
    assert [result["error"] for result in results if "error" in result] == []
    for result in results:
        assert ("forward_ms" in result) != ("skipped" in result), result
        assert ("both_ms" in result) != ("forward_only" in result or "skipped" in result), result
    by_name = {result["row"]: result for result in results}
    assert by_name[chosen]["time_ratio"] > 0
    assert by_name[chosen]["options"]["always"] == ["first", "current"]
    full, moba = (by_name[name] for name in ("full", chosen))
    share = moba["pairs"] / full["pairs"]
    assert 0.5 < share < 1
    assert moba["time_per_pair"] == pytest.approx(moba["time_ratio"] / share)
    assert by_name["moba"]["skipped"].startswith("block_size: given 512 in the layer, which does not fit")


def test_packages_of_others_are_rows_and_a_missing_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row.parse(name) for name in PEERS]
    deadline = time.monotonic() + 60
    missing = [result["error"] for result in measured(rows, [32], TINY, CPU, on_cpu, deadline)]
    assert all(error.startswith("ModuleNotFoundError: No module named") for error in missing)

    def nsa(q: Tensor, k: Tensor, v: Tensor, *, window_size: int, **gates: Any) -> Tensor:
        assert [x.shape for x in (q, k, v, gates["g_swa"])] == [(1, 32, 4, 8), (1, 32, 2, 8), (1, 32, 2, 8), (1, 32, 4)]
        assert window_size == 0, "flash-attn 2 is not installed"
        return q * 2

    def msa(
        q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        assert [x.shape[1] for x in (q_proxy, k_proxy, q, k, v)] == [2, 1, 4, 2, 2]
        return q.transpose(1, 2).flatten(2), torch.zeros((), requires_grad=True)

    monkeypatch.setitem(sys.modules, "fla.ops.nsa.parallel", SimpleNamespace(parallel_nsa=nsa, flash_attn_func=None))
    monkeypatch.setitem(sys.modules, "flash_msa", SimpleNamespace(flash_msa_func=msa))
    results = [*measured(rows, [32], TINY, CPU, on_cpu, deadline)]
    assert [result["both_ms"]["count"] for result in results] == [1, 1]
    settings = {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    source = {"device": "none", "torch": "2", "commit": "0123456789", "command": "python", "settings": settings}
    assert "| `fla-nsa` |" in render({**source, "results": results})


@pytest.mark.parametrize(
    ("text", "message"),
    [("mobba", "'mobba' is not a registered"), ("moba:topk=0", "topk"), ("moba:top=2", "did you mean 'topk'")],
)
def test_a_bad_row_is_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run(monkeypatch, "--quick", "--kinds", text)
    assert message in capsys.readouterr().err


def test_rows_that_time_or_memory_do_not_allow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row.parse("full"), Row.parse("moba:block_size=16,topk=2")]

    def slow(forward: Callable[[], Any], both: Callable[[], Any] | None) -> dict[str, Any]:
        forward()
        return times(2000)

    deadline = time.monotonic() + 60
    short, _, long, _ = measured(rows, [128, 32], TINY, CPU, slow, deadline)
    assert (short["tokens"], short["both_ms"]["median"]) == (32, 2000)
    assert long["skipped"] == "a call would take 8 s or more"
    assert {result["skipped"] for result in measured(rows, [32], TINY, CPU, slow, deadline=0)} == {
        "no time left: --budget-seconds"
    }

    def full_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And more")

    monkeypatch.setattr(mechanisms, "MechanismLayer", full_memory)
    short, long = measured(rows[:1], [32, 64], TINY, CPU, slow, deadline)
    assert short["error"] == "out of memory: CUDA out of memory"
    assert long["skipped"] == "it fails with 32 tokens"


def test_the_kind_gets_what_the_models_layer_hands_to_it() -> None:
    """Queries, keys and values of the layer's own projections, each waiting for a gradient."""
    layer = mechanisms.MechanismLayer(kind_of("moba:block_size=16,topk=2"), TINY, 48, CPU)
    (out, gradient), *others = layer.forward()
    assert not others
    assert out.shape == gradient.shape == (48, 4, 8)
    found = torch.autograd.grad(out, layer.leaves, gradient, allow_unused=True)
    assert [None if grad is None else tuple(grad.shape) for grad in found] == [None, (48, 4, 8), (48, 2, 8), (48, 2, 8)]
    assert on_cpu(layer.forward, layer.both)["both_ms"]["count"] == 1


@pytest.mark.parametrize("kind", ["full", "moba_v05:block_size=16", "nsa:block_size=32,window=16"])
def test_a_layer_holds_its_leaves_alone_and_ends_without_the_garbage_collector(kind: str) -> None:
    """What stayed until Python collected it was counted in the peaks of the rows that followed."""
    tokens = 71

    def living() -> int:
        """Elements of the sequence's tensors, without what is kept with layouts, and the angles of half a head."""
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.is_floating_point()]
        return sum(x.numel() for x in tensors if x.shape[:1] == (tokens,) and x.shape[-1] != 4)

    gc.collect()
    gc.disable()
    try:
        layer = mechanisms.MechanismLayer(kind_of(kind), TINY, tokens, CPU)
        leaves = sum(x.numel() for x in layer.leaves if len(x) == tokens)
        assert living() == leaves + sum(x.numel() for x in layer.upstream)
        layer.both()
        del layer
        assert living() == 0
    finally:
        gc.enable()


def file(*results: dict[str, Any]) -> dict[str, Any]:
    settings = {"hidden_size": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "dtype": "bfloat16"}
    source = {"device": "some GPU", "torch": "2", "commit": "0123456789", "command": "python"}
    return {**source, "settings": settings, "results": list(results)}


def test_rows_are_compared_with_full_attention_at_their_length() -> None:
    full = {"row": "full", "tokens": 8192, **times(3, 1.0)}
    slow = compared({"row": "slow", "tokens": 8192, **times(6, 1.6)}, [full])
    assert (slow["time_ratio"], slow["flags"]) == (2, ["slower than full attention", "1.6 x its memory"])
    fast = compared({"row": "fast", "tokens": 8192, **times(1.5, 1.5)}, [full])
    assert (fast["memory_ratio"], "flags" in fast) == (1.5, False)
    assert compared({"row": "far", "tokens": 32768, **times(6)}, [full]) == {"row": "far", "tokens": 32768, **times(6)}
    forward = compared({"row": "half", "tokens": 8192, "forward_ms": {"median": 2.0}, "peak_gib": 9.0}, [full])
    assert (forward["time_ratio"], "memory_ratio" in forward) == (2, False), "without a backward pass it saves nothing"


def test_the_table_has_what_was_measured_and_every_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"row": "full", "tokens": 8192, "parameters": 0, **times(3, 1.0)}
    slow = compared({"row": "slow", "tokens": 8192, "parameters": 1234, **times(6, 1.6)}, [full])
    refused = [{"row": "no", "tokens": tokens, "skipped": "too short"} for tokens in (8192, 32768)]
    data = file(full, slow, *refused, {"row": "slow", "tokens": 32768, "error": "out of memory"})
    head, _, *lines = (line.split(" | ") for line in render(data).split("\n\n")[0].splitlines())
    assert head == ["| kind", "8K tokens", "32K tokens", "own parameters |"]
    assert lines[0] == ["| `full`", "1.00 / 3.00; 1.0", "–", "– |"]
    assert lines[1] == ["| `slow`", "2.00 / 6.00; 1.6 (2.00, 1.60) ✗", "fails", "1,234 |"]
    assert lines[2] == ["| `no`", "not run", "not run", "– |"]
    assert "- `no` at 8K, 32K: left out: too short\n- `slow` at 32K: fails: out of memory" in render(data)

    (tmp_path / "r.json").write_text(json.dumps(data))
    page = tmp_path / "page.md"
    page.write_text(f"a\n{MARKER}\nold\n{END}\nb\n")
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(tmp_path / "r.json"), "--write", str(page)])
    mechanisms_table.main()
    assert page.read_text() == f"a\n{MARKER}\n\n{render(data)}\n\n{END}\nb\n"


def test_the_document_has_the_rows_of_index_keys_and_groups() -> None:
    text = (ROOT / "benchmarks" / "measured" / "attention-kinds.md").read_text()
    found = json.loads((mechanisms_table.RESULT.parent / "distilled-groups-h200.json").read_text())["results"]
    for short, long in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert short["row"] == long["row"]
        cells = [f"{row['both_ms']['median']:#.3g}" for row in (short, long)]
        if short["row"] != "full":
            cells = [f"{ms} ({row['time_ratio']:#.2g})" for ms, row in zip(cells, (short, long), strict=True)]
        assert f"| `{short['row']}` | {' | '.join(cells)} |\n" in text


def test_the_document_holds_the_table_of_the_committed_result() -> None:
    text = (ROOT / "benchmarks" / "measured" / "attention-kinds.md").read_text()
    inside = text.partition(MARKER)[2].partition(END)[0].strip()
    committed = mechanisms_table.RESULT
    assert inside == (render(json.loads(committed.read_text())) if committed.exists() else "")
