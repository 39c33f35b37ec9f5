"""Runs that keep more or less of their activations, or send them to the host, are bit by bit the same run."""

from pathlib import Path
from typing import Any

import pytest

from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

LEAST = {"memory": {"gpu_gib": 1e-9}}
"""Nothing fits: `budget` recomputes even attention."""
OFFLOAD = {"activation_offload": True}


def short(folder: Path, corpora: Path, **changes: Any) -> Run:
    """Two stages of two steps, full attention and then MoBA with packed documents; not evaluated."""
    folder.mkdir()
    run = Run(folder, corpora)
    run.recipe |= changes
    for stage in run.recipe["stages"]:
        stage |= {"tokens": 2 * 512, "micro_batch_size": 2}
    del run.recipe["data"]["validation"]
    del run.recipe["evaluation"]
    return run


def curves(run: Run) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in run.records()]


def kept(run: Run) -> list[list[str]]:
    """What the layers kept, as each stage reported."""
    return [record["kept"] for record in run.records("activations")]


def test_a_run_goes_on_with_other_policies_bit_by_bit(tmp_path: Path, corpora: Path) -> None:
    run = short(tmp_path / "alone", corpora)
    assert run.train_here() == 0
    assert kept(run) == run.records("warning") == [], "a CPU that keeps everything has nothing to report"
    changed = short(tmp_path / "changed", corpora, activation_checkpointing="full", **OFFLOAD)
    assert changed.train_here("--stop-at-step", "1") == 0
    changed.recipe["activation_checkpointing"] = "selective"
    assert changed.train_here("--stop-at-step", "3") == 0
    changed.recipe |= {"activation_checkpointing": "budget", **LEAST}
    assert changed.train_here() == 0
    assert kept(changed) == [["attention"] * 2, ["products"] * 2, ["products"] * 2, ["input"] * 2]
    assert changed.records("activations")[0]["on_host"] == [True, False]
    (warning,) = changed.records("warning")
    assert "memory.gpu_gib: given 1e-09, but stage long needs 0.1 GiB on each GPU (predicted)" in warning["message"]
    assert curves(changed) == curves(run)
    assert_same_tensors(changed.newest_checkpoint, run.newest_checkpoint)


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [({"cp": 2}, LEAST), ({"tp": 2}, {"activation_checkpointing": "selective"})],
    ids=["cp, attention recomputed", "tp, selective"],
)
def test_two_ranks_that_share_sequences_or_layers(
    parallel: dict[str, int], changes: dict[str, Any], tmp_path: Path, corpora: Path, ranks: Ranks
) -> None:
    alone = short(tmp_path / "alone", corpora, parallel=parallel)
    ranks.train(alone, 2)
    run = short(tmp_path / "run", corpora, parallel=parallel, **OFFLOAD, **changes)
    ranks.train(run, 2)
    assert curves(run) == curves(alone)
    assert_same_tensors(run.newest_checkpoint, alone.newest_checkpoint)


def test_too_little_host_memory_is_refused_with_the_key_to_change(
    tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = short(tmp_path / "run", corpora, activation_checkpointing="full", memory={"host_gib": 1e-9}, **OFFLOAD)
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert "activation_offload: stage short needs 0.0 GiB of host memory for each GPU" in error
    assert "set activation_checkpointing: budget" in error
