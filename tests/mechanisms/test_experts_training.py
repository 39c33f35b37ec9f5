"""Training with experts: bitwise resume, also onto other ep, AdamW and Muon, biases in checkpoints, torch.compile."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.saved_recipe import open_checkpoint
from tests.run.faults import inject, not_a_number
from tests.run.tiny_run import Run, assert_same_tensors, assert_same_training, checkpoint_tensors
from tests.run.trainer_ranks import Ranks, train_traced

MIXTURE = {
    "experts": 4,
    "active": 2,
    "intermediate_size": 24,
    "layers": "last:1",
    "router": {"balance": "both", "bias_update": 0.002},
}
STEPS = 4


def with_experts(run: Run, parallel: dict[str, Any], **changes: Any) -> Run:
    """The tiny run, of four steps in two stages, with experts in its second layer."""
    run.recipe["model"]["moe"] = MIXTURE
    run.recipe["parallel"] = parallel
    run.recipe["checkpoint"]["every"] = 2
    run.recipe["evaluation"]["every"] = 3  # between two steps: it must not count
    run.recipe |= changes
    for stage in run.recipe["stages"]:
        stage |= {"tokens": STEPS // 2 * 512, "micro_batch_size": 2}
    return run


def curves(run: Run) -> dict[str, list[float]]:
    keys = ("loss", "grad_norm", "expert_load_max", "expert_load_entropy", "expert_bias_max", "auxiliary_loss")
    return {key: [record[key] for record in run.records()] for key in keys}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """One rank, which takes the sequences one by one, all others two at once. Not to be changed."""
    run = with_experts(Run(tmp_path_factory.mktemp("alone"), corpora), {})
    for stage in run.recipe["stages"]:
        stage["micro_batch_size"] = 1
    ranks.train(run, 1)
    return run


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """Two ranks, each with half of the experts. Not to be changed."""
    run = with_experts(Run(tmp_path_factory.mktemp("divided"), corpora), {"ep": 2})
    ranks.train(run, 2)
    return run


def go_on(run: Run, other: Run) -> None:
    """Begin after the second step of the other run."""
    shutil.copytree(other.run_dir, run.run_dir)
    shutil.rmtree(run.run_dir / "checkpoints" / f"step_{STEPS:08d}")


def test_two_ranks_with_half_of_the_experts_each_train_as_one(divided: Run, alone: Run) -> None:
    assert_same_training(curves(divided), curves(alone))
    ours, theirs = (checkpoint_tensors(run.newest_checkpoint) for run in (divided, alone))
    stack = "model.blocks.1.feed_forward.experts.up_proj.weight"
    assert ours[stack].shape == (4, 24, 32)
    torch.testing.assert_close(ours[stack], theirs[stack], rtol=1e-3, atol=1e-5)
    bias = ours["model.blocks.1.feed_forward.bias"]
    assert torch.equal(bias, theirs["model.blocks.1.feed_forward.bias"])
    assert bias.abs().max() > 0
    assert {round(float(value) / 0.002) for value in bias} <= set(range(-STEPS, STEPS + 1)), "one update a step"


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(run: Run, divided: Run, ranks: Ranks) -> None:
    go_on(with_experts(run, {"ep": 2}), divided)
    ranks.train(run, 2)
    assert_same_tensors(run.newest_checkpoint, divided.newest_checkpoint)


def test_a_run_goes_on_with_another_ep(run: Run, alone: Run, divided: Run, ranks: Ranks) -> None:
    go_on(with_experts(run, {"ep": 4, "cp": 2}, activation_checkpointing="full"), divided)
    ranks.train(run, 4)
    assert_same_training(curves(run), curves(alone))


@pytest.mark.parametrize("source", ["a checkpoint", "an exported folder"])
def test_a_run_may_add_biases_to_the_model_it_begins_with_but_not_drop_them(
    source: str, run: Run, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, balance: str, init_from: Path | None = None) -> tuple[int, Path]:
        (tmp_path / name).mkdir()
        made = with_experts(Run(tmp_path / name, corpora), {}, stages=run.recipe["stages"][:1])
        made.recipe["model"]["moe"] = MIXTURE | {"router": {"balance": balance}}
        if init_from is not None:
            made.recipe["init_from"] = str(init_from)
        if (code := made.train_here()) or source == "a checkpoint":
            return code, made.run_dir
        folder = tmp_path / f"{name}-exported"
        export_to_hf(open_checkpoint(made.newest_checkpoint), folder, torch.float32, 1 << 30, with_code=True)
        return code, folder

    code, without = train("without", "loss")
    assert code == 0
    code, biased = train("biased", "both", without)
    assert code == 0
    assert train("on", "bias", biased)[0] == 0
    assert train("dropped", "loss", biased)[0] == 2
    message = capsys.readouterr().err
    assert "model.moe.router.balance: init_from (" in message
    assert "has 'both' and its buffers, which this recipe would drop; set that" in message or source != "a checkpoint"


@pytest.mark.parametrize("parallel", [{}, {"ep": 2}], ids=["dp 2", "ep 2"])
def test_muon_takes_every_expert_as_a_matrix(
    tmp_path: Path, corpora: Path, parallel: dict[str, Any], ranks: Ranks
) -> None:
    muon = {"kind": "muon", "lr": 0.01}
    one, other = (
        with_experts(Run(tmp_path / name, corpora), layout, optim=muon)
        for name, layout in (("one", {}), ("other", parallel))
    )
    for run, count in ((one, 1), (other, 2)):
        run.folder.mkdir()
        ranks.train(run, count)
    assert_same_training(curves(other), curves(one))
    tensors = checkpoint_tensors(other.newest_checkpoint)
    stack = "blocks.1.feed_forward.experts.up_proj.weight"
    assert f"optim.{stack}.momentum_buffer" in tensors
    assert "optim.blocks.1.feed_forward.router.weight.exp_avg" in tensors


def train_in_a_graph_for_each_kind_of_layer(recipe: str) -> int:
    """Documents of other lengths compile nothing again."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    code = train_traced(recipe)
    assert counters["stats"]["unique_graphs"] == 2
    return code


def test_compiled_blocks_count_each_token_once(run: Run, corpora: Path, ranks: Ranks) -> None:
    """With what is kept recomputed: the choice of experts, by which tokens are counted on one rank as on two, is one
    operator, which is kept whole, and so is each way of the tokens to other ranks and back."""
    short = {"precision": {"compute": "bf16"}, "stages": run.recipe["stages"][:1]}  # tracing takes seconds
    plain = with_experts(Run(run.folder / "plain", corpora), {}, **short)
    plain.folder.mkdir()
    plain.use_short_documents()
    assert plain.train_here() == 0
    with_experts(run, {"ep": 2}, compile=True, activation_checkpointing="full", **short)
    run.use_short_documents()
    ranks.work(train_in_a_graph_for_each_kind_of_layer, [str(run.write_recipe())], 2)
    for key, values in curves(plain).items():
        assert curves(run)[key] == pytest.approx(values, rel=0.05), key


def test_the_report_and_a_spike_dump_show_the_load_of_the_experts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, {2: not_a_number})
    with_experts(run, {})
    run.recipe["telemetry"]["report"] = True
    run.recipe["health"] = {"spike": {"reaction": "skip_step"}}
    run.recipe["stages"] = run.recipe["stages"][:1]
    assert run.train_here() == 0
    page = (run.run_dir / "report.html").read_text()
    assert '"key":"experts"' in page
    assert '"key":"routers"' in page
    assert '"name":"largest bias"' in page
    assert '"key":"expert-load-0"' in page
    for record in run.records():
        assert record["expert_dropped"] == 0
        loads = record["expert_load_layer_1"]
        assert (len(loads), sum(loads)) == (4, pytest.approx(400, abs=2))
        assert max(loads) == pytest.approx(100 * record["expert_load_max"], abs=0.5)
    (layers,) = run.dump(2)["feed_forwards"]
    assert sum(layers["1"]["load"]) == 2 * run.records()[1]["loss_tokens"]
    assert any(layers["1"]["bias"]), "moved by the first step"
