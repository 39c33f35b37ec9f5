"""The benchmark's own plumbing, from command line to tables, with the reference on the CPU in place of a GPU."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention, crossover, timing
from benchmarks.attention_peers import Peer
from benchmarks.attention_rows import Case, Row, compile_ahead


def fake_measure(
    forward: Callable[[], Any], both: Callable[[], Any], budget_s: float, warm: bool = False
) -> dict[str, Any]:
    """Calls everything once and claims round numbers."""
    forward()
    both()
    one = {"median": 1.0, "min": 1.0, "max": 1.0, "count": 1}
    return {"forward_ms": one, "both_ms": {**one, "median": 3.0}, "peak_gib": 0.5}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, crossover):
        monkeypatch.setattr(module, "Row", functools.partial(Row, device="cpu", backend="reference"))
        monkeypatch.setattr(module, "compile_ahead", lambda cases: [])
    monkeypatch.setattr(attention, "need_gpus", lambda parser: None)
    monkeypatch.setattr(attention, "measure", fake_measure)
    monkeypatch.setattr(attention, "kernel_times", lambda call: {"attend": 2.0, "others": 1.0})
    monkeypatch.setattr(crossover, "milliseconds", lambda call, budget: [2.0 for _ in [call()]])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["attention.py", *arguments])
    attention.main()


@pytest.mark.usefixtures("on_cpu")
def test_rows_are_checked_timed_printed_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    rows = ["512:64/3", "512:64/3,heads=4,kv=2,routing=sink,documents=2", "512:64/3,routing=local"]
    run(monkeypatch, "--rows", *rows, "--output", str(output))
    data = json.loads(output.read_text())
    assert [result["row"] for result in data["results"]] == rows
    plain, packed, local = data["results"]
    assert plain["columns"]["auto"]["kernels_ms"] == {"attend": 2.0, "others": 1.0}
    assert "RuntimeError" in plain["columns"]["cudnn"]["error"], "a peer that cannot run here is reported"
    assert local["columns"]["cudnn"] == plain["columns"]["cudnn"], "dense attention does not depend on the routing"
    assert "cudnn" not in packed["columns"], "it has no packed documents"
    assert packed["routed"] > 0.99
    printed = capsys.readouterr().out
    assert "routed as wanted" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("| 512 | 64/3 | 1.00 / 3.00 |"))
    assert "fails" in line
    assert "WRONG" not in printed


@pytest.mark.usefixtures("on_cpu")
def test_a_row_that_fails_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = attention.run

    def run_but(case: Case, *rest: Any) -> dict[str, Any]:
        if case.topk == 2:
            raise MemoryError("too much")
        return real(case, *rest)

    monkeypatch.setattr(attention, "run", run_but)
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "--rows", "256:64/2", "256:64/3", "--output", str(tmp_path / "r.json"))
    assert "256:64/2: MemoryError: too much" in capsys.readouterr().out
    first, second = json.loads((tmp_path / "r.json").read_text())["results"]
    assert "error" in first
    assert "columns" in second


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_result_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(attention.attention_check.LIMITS, "out", 0.0)
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "--rows", "256:64/3")
    assert "WRONG: {'out'" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("up_to", "dense"), [([], {"dense"}), (["--dense-up-to", "100"], set())])
def test_long_rows_leave_dense_attention_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, up_to: list[str], dense: set[str]
) -> None:
    def calls(row: Row) -> Any:
        return row.forward, row.both

    peers = [Peer("dense", 256, calls, dense=True), Peer("other", 256, calls), Peer("short", 128, calls)]
    monkeypatch.setattr(attention, "peers", lambda: peers)
    output = tmp_path / "r.json"
    run(monkeypatch, "--rows", "256:64/2", "256:64/2,routing=uniform", "--output", str(output), *up_to)
    plain, varied = json.loads(output.read_text())["results"]
    assert set(plain["columns"]) == {"auto", plain["backend"], "other"} | dense
    run(monkeypatch, "--rows", "256:64/2", "--output", str(output), "--peers", "other")
    assert set(json.loads(output.read_text())["results"][0]["columns"]) == {"auto", plain["backend"], "other"}
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--rows", "256:64/2", "--peers", "othr")
    assert set(varied["columns"]) == {"auto", varied["backend"]} | dense, (
        "other implementations of MoBA run plain rows only"
    )


def test_a_wrong_row_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--rows", "8K:512/3,routing=bad")
    assert "routing 'bad' given, allowed" in capsys.readouterr().err


def test_what_cannot_be_compiled_ahead_is_told_and_stops_nothing() -> None:
    (error,) = compile_ahead([Case.parse("512:65/2"), Case.parse("1K:65/2,documents=2x512")])
    assert error.startswith("195:65/2: ")


def test_kernels_are_listed_by_time_and_torchs_own_together() -> None:
    times = {"dq": 1.0, "dkdv": 2.0, "sort": 0.25, "copy": 0.5, "unused": 0.0}
    found = timing.grouped(times, {"dq", "dkdv", "unused"})
    assert list(found.items()) == [("dkdv", 2.0), ("dq", 1.0), ("others", 0.75)]


def test_our_kernels_are_found_in_their_modules() -> None:
    pytest.importorskip("triton")
    names = timing.kernel_names()
    assert len(names) > 5
    assert all(name.isidentifier() for name in names)


def test_crossover_looks_at_both_sides_of_topk_blocks() -> None:
    found = crossover.cases("128/8", 2**15)
    blocks = [case.lengths()[0] // 128 for case in found]
    assert blocks == [4, 8, 9, 16, 32]
    assert all(2**15 * 0.9 < case.tokens <= 2**15 for case in found)
    assert all(Case.parse(case.name) == case for case in found)
    assert crossover.cases("4096/12", 2**15)[-1].lengths() == [4 * 12 * 4096], "at least one document"


@pytest.mark.usefixtures("on_cpu")
def test_crossover_compares_with_every_dense_kernel_of_this_machine() -> None:
    case = Case.parse("512:64/2,heads=2,kv=1,d=64,documents=4x128")
    found = crossover.against_dense(case, 0.0)
    assert (found["blocks"], found["documents"], found["same_result"]) == (2, 4, True)
    assert "sdpa" in found["dense_ms"]
    assert "reference" not in found["dense_ms"]


def crossing(blocks: int, moba: float, **dense: float) -> dict[str, Any]:
    return {
        "setting": "64/2",
        "length": 64 * blocks,
        "documents": 4,
        "blocks": blocks,
        "same_result": blocks <= 2,
        "moba_ms": {"median": moba},
        "dense_ms": {name: {"median": ms} for name, ms in dense.items()},
    }


def test_the_crossover_table_judges_only_where_the_result_is_the_same() -> None:
    text = crossover.dense_table(
        [crossing(1, 2.0, cudnn=1.0, flash=1.5), crossing(2, 2.0, cudnn=1.0, flash=4.0), crossing(3, 2.0, cudnn=9.0)]
    )
    lines = text.splitlines()
    assert lines[2] == "| 64/2 | 1 | 4 x 64 | 2 | 1 | 1.5 | 2.00, 1.33 | either |"
    assert lines[4] == "| 64/2 | 3 | 4 x 192 | 2 | 9 | – | 0.22, – | MoBA only |"
    assert lines[-1] == "Where either may be taken: cudnn is faster in 2 of 2; flash is faster in 1 of 2."
