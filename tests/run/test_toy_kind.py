"""A new attention kind is one file: the kind `toy`, with parameters and an auxiliary loss, is defined here and nowhere
else, and goes where `full` and `moba` go: plan, training under context parallelism, resume, evaluation, generation."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention import registry
from moba_train.attention.full.full_kind import FullKind, full_pairs
from moba_train.attention.kind import AttentionKind, LayerInput, StageContext
from moba_train.config.base import Section
from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError
from moba_train.memory.flops import layer_flops
from moba_train.model.build import build_attention, build_model
from moba_train.train import main
from tests.resolved import check, plan_of, spec_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

HIDDEN, HEADS = 32, 4


class Gate(nn.Module):
    """A gate for each head, from the layer's input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden, heads)


class ToyKind(AttentionKind):
    """Full attention whose heads are gated by the layer's input; the auxiliary loss pulls the gates to one quarter."""

    name = "toy"

    class Options(Section):
        """Options of `kind: toy`."""

        pull: float = Field(0.1, ge=0, description="weight of the auxiliary loss")

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = FullKind(FullKind.Options(backend="reference"), head_dim).attentions

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        assert isinstance(options, ToyKind.Options)
        if options.pull > context.seq_len:
            yield f"pull: given {options.pull:g} {context.layers}; allowed: at most seq_len {context.seq_len}"

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        return Gate(model.hidden_size, model.heads)

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        return torch.zeros(shape, device=generator.device) if parameter == "proj.weight" else None

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(parameters, Gate)
        assert isinstance(self.options, ToyKind.Options)
        out_THd, _ = super().mix(layer, parameters)
        gate_TH = parameters.proj(layer.x_TD).sigmoid()
        return out_THd * gate_TH.unsqueeze(-1), self.options.pull * (gate_TH.float() - 0.25).square().mean(-1)

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        return full_pairs(lengths)


def train_with_toy(*command: str) -> int:
    """`python -m moba_train.train`, in a process where this kind is registered."""
    registry.KINDS.register(ToyKind.name, ToyKind)
    return main(list(command))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with registry.KINDS.registered("toy", ToyKind):
        yield


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Ranks]:
    """Processes of this file alone, as the kind stays registered in them."""
    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture
def toy_run(run: Run) -> Run:
    """Full attention, then the toy kind in the first layer and MoBA in the second."""
    run.recipe["stages"][1]["attention"] = {"full_layers": "none", "overrides": {0: {"kind": "toy"}}}
    return run


def train(run: Run, ranks: Ranks, count: int, *arguments: str) -> None:
    ranks.work(train_with_toy, [str(run.write_recipe()), *arguments], count)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, own_ranks: Ranks) -> Run:
    """The toy run on two ranks that share every sequence. Not to be changed."""
    run = Run(tmp_path_factory.mktemp("toy"), corpora)
    run.recipe["stages"][1]["attention"] = {"full_layers": "none", "overrides": {0: {"kind": "toy"}}}
    run.recipe["parallel"] = {"cp": 2}
    run.recipe["checkpoint"]["keep_last"] = 10
    train(run, own_ranks, 2)
    return run


def test_its_options_are_a_section_of_the_recipe_with_its_own_checks(toy_run: Run) -> None:
    toy_run.recipe["attention"]["toy"] = {"pull": 1000}
    config = load_config(toy_run.write_recipe())
    with pytest.raises(ConfigError, match=r"stages\[1\]\.attention\.toy\.pull: given 1000 in layer 0; allowed"):
        check(config)
    toy_run.recipe["attention"]["toy"] = {"pul": 1}
    with pytest.raises(ConfigError, match=r"attention\.toy\.pul: unknown key \(did you mean 'pull'"):
        load_config(toy_run.write_recipe())


def test_tensor_parallelism_is_refused_for_its_parameters(toy_run: Run) -> None:
    toy_run.recipe["parallel"] = {"tp": 2}
    with pytest.raises(ConfigError, match=r"parallel\.tp: given 2, but kind 'toy'"):
        check(load_config(toy_run.write_recipe()))


def test_its_plan_counts_its_parameters_exactly(toy_run: Run) -> None:
    config = load_config(toy_run.write_recipe())
    plan = plan_of(config, 1)
    with torch.device("meta"):
        model = build_model(spec_of(config))
    assert plan.parameters.attention_kinds == HIDDEN * HEADS + HEADS
    assert plan.parameters.total == sum(parameter.numel() for parameter in model.parameters())


def test_its_flops_are_attention_in_the_documents_and_its_matrices(toy_run: Run) -> None:
    config = load_config(toy_run.write_recipe())
    (toy,) = {kind for kind in build_attention_of(config) if kind.kind == "toy"}
    pairs, tokens = (100**2 + 28**2) / 2, 128
    expected = 12 * HIDDEN * pairs + 6 * HIDDEN * HEADS * tokens
    assert layer_flops(config.model, toy, [100, 28]) == expected


def build_attention_of(config: Any) -> Sequence[Any]:
    from tests.resolved import stages_of

    stages = stages_of(config)
    assert [kind.name for kind in build_attention(stages[1].attention, config.model.head_width)] == ["toy", "moba"]
    return stages[1].attention


def test_training_is_that_of_one_device_under_context_parallelism(
    finished: Run, toy_run: Run, own_ranks: Ranks
) -> None:
    train(toy_run, own_ranks, 1)
    assert finished.losses() == pytest.approx(toy_run.losses(), rel=1e-3)
    for key in ("grad_norm", "auxiliary_loss", "auxiliary_loss_layer_0"):
        got, want = ([record[key] for record in run.records() if key in record] for run in (finished, toy_run))
        assert len(got) == (12 if key == "grad_norm" else 6)
        assert got == pytest.approx(want, rel=1e-2), key
    auxiliary = [record.get("auxiliary_loss") for record in finished.records()]
    assert auxiliary[:6] == [None] * 6
    assert auxiliary[6] == pytest.approx(0.1 * 0.25**2)  # gates begin at one half, where zeros put them
    assert auxiliary[-1] < auxiliary[6]


def test_a_stage_without_it_leaves_its_parameters_alone(finished: Run) -> None:
    """Not one bit: no gradient, no decay, no optimizer step."""
    before = checkpoint_tensors(finished.run_dir / "checkpoints" / "step_00000004")
    gate = {name: tensor for name, tensor in before.items() if ".attention.toy." in name}
    assert {name.partition(".")[0] for name in gate} == {"model", "optim"}
    assert all(not tensor.any() for tensor in gate.values())
    after = checkpoint_tensors(finished.newest_checkpoint)
    trained = "model.blocks.0.attention.toy.proj.weight"
    assert not torch.equal(after[trained], gate[trained])


def test_a_run_resumes_bitwise_inside_its_stage(finished: Run, toy_run: Run, own_ranks: Ranks) -> None:
    toy_run.recipe["parallel"] = {"cp": 2}
    toy_run.take_over(finished, 8)
    train(toy_run, own_ranks, 2)
    assert toy_run.losses() == finished.losses()
    assert_same_tensors(toy_run.newest_checkpoint, finished.newest_checkpoint)


def test_a_run_may_get_a_stage_with_it_later(run: Run, finished_run: Run, own_ranks: Ranks) -> None:
    """Its parameters are not in the checkpoint of a run that knew nothing of it: they begin with their initial values.
    A checkpoint whose stages use it must have them."""
    run.take_over(finished_run, 12)
    toys = {**run.recipe["stages"][1], "name": "toys", "tokens": 2 * 512, "attention": {"default": "toy"}}
    run.recipe["stages"].append(toys)
    train(run, own_ranks, 2)
    assert len(run.losses()) == 14
    first = run.records()[12]
    assert first["auxiliary_loss"] == pytest.approx(0.1 * 0.25**2)

    lost = Run(run.folder / "lost", run.folder)
    lost.folder.mkdir()
    lost.recipe = {**run.recipe, "run_dir": str(run.folder / "run"), "stages": run.recipe["stages"][:2]}
    lost.recipe["stages"][1]["attention"] = {"default": "toy"}
    lost.recipe["stages"][1]["tokens"] += 512
    shutil.rmtree(run.run_dir / "checkpoints" / "step_00000014")
    with pytest.raises(AssertionError, match="rank 0 failed"):
        train(lost, own_ranks, 2)


def test_it_begins_from_a_checkpoint_without_it(finished_run: Run, toy_run: Run) -> None:
    toy_run.recipe["init_from"] = str(finished_run.run_dir)
    toy_run.recipe["stages"] = toy_run.recipe["stages"][1:]
    toy_run.recipe["model"]["rope"] = toy_run.recipe["stages"][0].pop("rope")
    assert toy_run.train_here("--stop-at-step", "1") == 0
    before = checkpoint_tensors(finished_run.newest_checkpoint)["model.embedding.weight"]
    tensors = checkpoint_tensors(toy_run.newest_checkpoint)
    torch.testing.assert_close(tensors["model.embedding.weight"], before, rtol=0, atol=0.05)
    new = sum(x.numel() for name, x in tensors.items() if name.startswith("model.") and ".attention.toy." in name)
    (event,) = toy_run.records("init_from")
    assert event["message"].endswith(f"; {new:,} parameters of 'toy', which are not there, begin again")
