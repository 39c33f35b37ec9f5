"""docs/tutorials/eight-gpus.md: plan and launch print what it shows; training, a stop, a resumption and more ranks work
as it says, with two and four ranks on the CPU and a tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guide import ROOT, blocks, check_usage, commands, run, shown_lines
from tests.run.tiny_run import VOCAB, write_corpus
from tests.run.trainer_ranks import Ranks, run_training

GUIDE = ROOT / "docs" / "tutorials" / "eight-gpus.md"
SMALLER: dict[str, Any] = {
    "model": {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "layers": 4, "heads": 4, "kv_heads": 2},
    "data.tokenizer": None,
    "attention.moba": {"block_size": 32, "topk": 3},
    "batch_tokens": 2048,
    "optim.schedule.warmup_tokens": 0,
    "stages.0.seq_len": 256,
    "stages.0.tokens": 8192,
    "stages.1.seq_len": 512,
    "stages.1.tokens": 8192,
    "checkpoint.every": 2,
    "evaluation": {"every": 4, "sequences": 4},
    "telemetry.log_every": 1,
    "telemetry.report": False,
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder with the recipe."""
    folder = tmp_path_factory.mktemp("eight")
    (folder / "configs").symlink_to(ROOT / "configs")
    (recipe,) = blocks(GUIDE, "yaml")
    (folder / "recipe.yaml").write_text(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        yield folder


def page_commands(program: str) -> list[list[str]]:
    return [words for block in blocks(GUIDE, "bash") for words in commands(block) if program in words[:2]]


def test_plan_and_launch_print_what_the_page_shows() -> None:
    best, _, lines = blocks(GUIDE, "text")
    one_node, two_nodes = page_commands("plan")
    assert shown_lines(best, run(one_node)) == []
    assert "Best layouts" in run(two_nodes)
    (launch,) = page_commands("launch")
    assert shown_lines(lines, run(launch)) == []


def test_a_run_stops_resumes_and_goes_on_with_more_ranks(folder: Path, ranks: Ranks) -> None:
    (folder / "data").mkdir()
    for seed, part in enumerate(("train", "valid")):
        write_corpus(folder / "data" / f"corpus-{part}", 60, seed, (200, 600))
    parts = {name: [{"path": str(folder / "data" / f"corpus-{name}")}] for name in ("train", "valid")}
    places = {"run_dir": str(folder / "runs/one-node"), "data.train": parts["train"], "data.validation": parts["valid"]}
    # The ranks may have been started by another test, in another folder.
    smaller = [f"{key}={json.dumps(value)}" for key, value in (SMALLER | places).items()]
    first, stopped, resumed = page_commands("train")
    assert first == resumed == stopped[:-2]
    check_usage(stopped)
    arguments = [str(folder / first[2]), *first[3:], *smaller]
    ranks.work(run_training, [*arguments, stopped[-2], "3"], 2)
    ranks.work(run_training, [*arguments, "--stop-at-step", "5"], 2)
    ranks.work(run_training, arguments, 4)
    records = [json.loads(line) for line in (folder / "runs/one-node/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["type"] == "metrics"] == list(range(1, 9))
    assert [record["step"] for record in records if record["type"] == "resume"] == [3, 5]
    (report,) = page_commands("report")
    check_usage(report)
    run(report)
    assert (folder / "runs" / "one-node" / "report.html").stat().st_size > 1000
