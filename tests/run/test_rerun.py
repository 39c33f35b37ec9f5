"""A step that is not finite is run again: log and exit code tell a fault of the machine from one of the data."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint.manifest import read_meta
from moba_train.health import node, reaction
from moba_train.health.gpu import GpuState
from moba_train.parallel import fsdp
from moba_train.train import main
from tests.run.faults import Fault, gradient_not_a_number, inject, not_a_number, once_on_rank_1, steady
from tests.run.tiny_run import VOCAB, Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

STEPS = 4
HOST = socket.gethostname()


def once(fault: Fault) -> Fault:
    """`fault` in the first micro-batch that it meets."""
    left = [fault]
    return lambda loss: left.pop()(loss) if left else loss


def short(run: Run, **parallel: int) -> Run:
    """The steady run in four steps."""
    steady(run, "log", STEPS)
    run.recipe["parallel"] = parallel
    run.recipe["optim"]["schedule"] = {}
    return run


def train_with_a_fault_on_rank_1(recipe: str, fault: Fault) -> int:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, {2: once_on_rank_1(fault)})
        return main([recipe])


@pytest.mark.parametrize("fault", [not_a_number, gradient_not_a_number], ids=["forward", "backward"])
def test_a_fault_that_does_not_repeat_leaves_no_trace_in_the_weights(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    undisturbed, disturbed = (short(Run(tmp_path / name, corpora)) for name in ("undisturbed", "disturbed"))
    for run in (undisturbed, disturbed):
        run.folder.mkdir()
    assert undisturbed.train_here() == 0
    changed = inject(monkeypatch, {2: once(fault)})
    assert disturbed.train_here() == 0

    (event,) = disturbed.records("fault")
    assert (event["step"], event["fault"], event["ranks"], event["hosts"]) == (2, "transient", [0], [HOST])
    assert "loss nan, gradient norm nan" in event["message"] or fault is gradient_not_a_number
    assert (2, True) in changed
    assert "fault" in [alert["alert"] for alert in disturbed.records("alert")]
    assert disturbed.records("spike") == []
    assert disturbed.losses() == undisturbed.losses()
    assert_same_tensors(disturbed.newest_checkpoint, undisturbed.newest_checkpoint)
    ours, theirs = (read_meta(run.newest_checkpoint)["progress"] for run in (disturbed, undisturbed))
    assert ours["transient_faults"] == [[2, [HOST]]]
    assert ours["spike_detector"] == theirs["spike_detector"]


@pytest.mark.parametrize(
    ("parallel", "fault", "where"),
    [
        ({"cp": 2}, not_a_number, f"The loss was not finite on rank 1 on {HOST}"),
        ({"tp": 2}, gradient_not_a_number, "Every rank's own loss was finite, so the fault is in the backward pass"),
    ],
    ids=["cp", "tp"],
)
def test_the_rank_whose_loss_was_not_finite_is_named(
    run: Run, ranks: Ranks, parallel: dict[str, int], fault: Fault, where: str
) -> None:
    ranks.train(short(run, **parallel), 2)
    undisturbed = run.newest_checkpoint.rename(run.folder / "undisturbed")
    losses = run.losses()
    for path in (run.run_dir / "metrics.jsonl", *(run.run_dir / "checkpoints").iterdir()):
        path.rename(run.folder / path.name)
    ranks.work(train_with_a_fault_on_rank_1, [str(run.write_recipe()), fault], 2)

    (event,) = run.records("fault")
    assert event["fault"] == "transient"
    assert where in event["message"]
    assert 1 in event["ranks"]
    assert event["hosts"] == [HOST]
    assert run.losses() == losses
    assert_same_tensors(run.newest_checkpoint, undisturbed)


def test_too_many_faults_of_the_machine_end_the_run_with_a_code_of_their_own(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short(run)
    monkeypatch.setattr(reaction, "MOST_TRANSIENT", 1)
    run.recipe["checkpoint"]["every"] = 3
    changed = inject(monkeypatch, {2: once(not_a_number), 4: once(not_a_number)})
    assert run.train_here() == 75
    assert [event["step"] for event in run.records("fault")] == [2, 4]
    assert [step for step, _ in changed] == [1, 2, 3]
    printed = capsys.readouterr().err
    assert f"2 transient faults in 1000 steps, 1 are allowed: step 2 ({HOST}), step 4" in printed
    assert "the last checkpoint is step 3" in printed


def poisoned(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run in which one document alone has token 60, whose embedding is not a number."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(run.folder / "poisoned", np.uint16) as writer:
        for document in range(40):
            tokens = rng.integers(50, size=100).astype(np.uint16)
            tokens[40] = 60 if document == 17 else tokens[40]
            writer.add_document(tokens)
    initialize: Callable[..., None] = fsdp.initialize_weights

    def with_one_row_broken(model: Any, seed: int) -> None:
        initialize(model, seed)
        weight = model.embedding.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        assert len(local) == VOCAB
        with torch.no_grad():
            local[60] = torch.nan

    monkeypatch.setattr(fsdp, "initialize_weights", with_one_row_broken)
    short(run).recipe["data"] = {"train": [{"path": str(run.folder / "poisoned")}]}
    return run


def test_a_fault_that_repeats_names_the_document(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The corpus is read more than once, so that the document comes up within it."""
    run = poisoned(run, monkeypatch)
    run.recipe["stages"][0]["tokens"] = 20 * 512
    assert run.train_here() == 65
    (event,) = run.records("fault")
    assert event["fault"] == "reproducible"
    assert any(name.startswith(f"{run.folder / 'poisoned'} document 17 tokens ") for name in event["documents"])
    assert f"{len(event['documents'])} of the batch's" in event["message"]
    printed = capsys.readouterr().err
    assert event["documents"][0] in printed
    assert "not applied" in printed
    dump = json.loads((run.run_dir / "spikes" / f"step_{event['step']:08d}.json").read_text())
    assert sum(len(parts) for parts in dump["ranks"][0]["micro_batches"]) > len(event["documents"])


class BrokenGpu:
    """A GPU with errors that ECC could not correct."""

    name = "GPU 2 (GPU-1234)"

    def read(self) -> GpuState:
        return GpuState(uncorrected_ecc=7)


def test_a_broken_gpu_is_refused_before_anything_is_made_or_watched_where_that_is_allowed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "find_gpu", lambda _uuid: BrokenGpu())
    monkeypatch.setattr(node, "_uuid", lambda _device: "GPU-1234")
    assert short(run).train_here() == 75
    printed = capsys.readouterr().err
    assert f"host {HOST}, rank 0, GPU 2 (GPU-1234): 7 uncorrected ECC errors" in printed
    assert "health.node.on_fault" in printed
    assert not (run.run_dir / "metrics.jsonl").exists()

    run.recipe["health"]["node"] = {"on_fault": "warn"}
    assert run.train_here() == 0
    (alert,) = [alert for alert in run.records("alert") if alert["alert"] == "node"]
    assert f"host {HOST}, rank 0, GPU 2 (GPU-1234): 7 uncorrected ECC errors" in alert["text"]
