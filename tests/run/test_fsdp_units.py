"""How FSDP gathers weights changes time and memory, never a bit: a small model on one rank as one unit, others block by
block, and these once or twice a micro-batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moba_train.config.load import load_config
from moba_train.config.mesh import MeshSizes
from moba_train.data.batch import collate
from moba_train.memory.activations import _Choice
from moba_train.model import transformer
from moba_train.model.build import build_attention
from moba_train.model.loss import chunk_loss
from moba_train.model.transformer import Transformer
from moba_train.parallel import forward, fsdp
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import joined_world
from moba_train.run import learner
from moba_train.train import main as trainer_main
from tests.resolved import sharded_of, stages_of, weights_of, work_of
from tests.run.test_pipeline_gradients import MICRO_BATCHES, drawn_samples, recipe
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_one_unit_and_units_of_one_block_give_the_same_bits(
    compute: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and optimizer after two stages, of which the first trains blocks only, with evaluations between."""
    models: list[Transformer] = []
    build = learner.sharded_model

    def noted(*arguments: Any) -> Transformer:
        models.append(build(*arguments))
        return models[-1]

    monkeypatch.setattr(learner, "sharded_model", noted)
    run.recipe["precision"] = {"compute": compute}
    run.recipe["stages"][0]["trainable"] = ["blocks.*"]
    saved = []
    for least in (fsdp.ONE_UNIT_PARAMETERS, 0):
        monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", least)
        run.recipe["run_dir"] = str(run.folder / f"up to {least}")
        assert run.train_here() == 0
        saved.append(run.newest_checkpoint)
    units = [[module for module in model.modules() if isinstance(module, FSDPModule)] for model in models]
    in_head = 2  # the last norm and the output projection, one unit
    assert [len(of_model) for of_model in units] == [1, 1 + run.recipe["model"]["layers"] + in_head]
    assert_same_tensors(*saved)


def test_larger_models_and_several_ranks_have_units_of_one_block() -> None:
    most = fsdp.ONE_UNIT_PARAMETERS
    assert fsdp.is_one_unit(most, MeshSizes())
    assert not fsdp.is_one_unit(most + 1, MeshSizes())
    assert not any(fsdp.is_one_unit(1, MeshSizes(**{name: 2})) for name in MeshSizes._fields)


def test_weights_that_stay_gathered_until_the_backward_pass_give_the_same_bits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches a step, with evaluations between, which gather each block once and free it. The head's weights
    stay in any case."""
    monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", 0)
    for stage in run.recipe["stages"]:
        stage["micro_batch_size"] = 2
    plain, gathers = FSDPParamGroup.unshard, Counter[str]()

    def counted(self: FSDPParamGroup, *given: bool) -> None:
        if not self.is_unsharded and self._all_gather_result is None:
            gathers[str(self._module_fqn)] += 1
        plain(self, *given)

    monkeypatch.setattr(FSDPParamGroup, "unshard", counted)
    layers = run.recipe["model"]["layers"]
    saved, losses, counts = [], [], []
    for resharded in (True, False, "budget"):
        run.recipe["run_dir"] = str(run.folder / f"resharded {resharded}")
        run.recipe["parallel"] = {"reshard_after_forward": resharded}
        if resharded == "budget":
            monkeypatch.setattr(_Choice, "fits", lambda _, found: sum(layer.weights for layer in found) <= 1)
        gathers.clear()
        assert run.train_here() == 0
        saved.append(run.newest_checkpoint)
        losses.append((run.losses(), [record["eval_loss"] for record in run.records("validation_loss")]))
        counts.append(gathers.copy())
    assert_same_tensors(*saved[:2])
    assert_same_tensors(*saved[1:])
    assert losses[0] == losses[1] == losses[2]
    passes = 6 * 512 // (2 * 64) + 6 * 512 // (2 * 128)  # of the stages' six steps each
    assert [counts[0].total() - few.total() for few in counts[1:]] == [passes * layers, passes]
    assert {count["norm, output"] for count in counts} == {counts[1]["blocks.0"]} == {counts[0]["blocks.0"] - passes}


class _Copies(TorchDispatchMode):
    """Counts the bytes of operands of copies and of sums in place, for each parameter."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.bytes = 0.0
        self._parameters = sum(weight.numel() for weight in model.parameters())

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*arguments, **(options or {}))
        name = str(operator)
        if any(part in name for part in ("aten.copy_", "aten._to_copy", "chunk_cat", "aten.add_.Tensor")):
            written = [result] if "to_copy" in name else [*(options or {}).values()]
            found = [tensor for tensor in tree_leaves([arguments, written]) if isinstance(tensor, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in found) / self._parameters
        return result


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_rank_alone_copies_no_more_than_it_must_and_has_the_bits_of_fsdp(
    compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of a step of four micro-batches, after one that an error ended in the middle."""
    monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", 0)
    wide = {"hidden_size": 256, "intermediate_size": 1024}  # more weights than activations
    config = recipe({"attention": {"default": "full"}, "precision": {"compute": compute}, "further": wide}, {})
    losses, gradients, copied, left = [], [], [], []
    found: Sequence[Callable[[Transformer], list[Any]]] = (lambda _: [], forward.unshared_groups)
    with joined_world() as world:
        dims = ParallelDims(MeshSizes(), world)
        (stage,) = stages_of(config)
        for groups in found:
            monkeypatch.setattr(forward, "unshared_groups", groups)
            model = sharded_of(config, dims)
            model.set_attention(build_attention(stage.attention, config.model.head_width))
            micro_batches = [collate([sample]) for sample in drawn_samples()]
            abandoned = forward.accumulate_gradients(model, micro_batches[2:], 7.0)
            next(abandoned)
            del abandoned
            left.append(any(weight.grad is not None for weight in model.parameters()))
            model.zero_grad()
            sums = forward.accumulate_gradients(model, micro_batches, 7.0)
            first = next(sums).loss.item()
            with _Copies(model) as copies:
                losses.append([first, *(one.loss.item() for one in sums)])
            gradients.append({name: weight.grad for name, weight in model.named_parameters()})
            copied.append(copies.bytes / (MICRO_BATCHES - 1))
    assert left == [True, False], "of tp's ranks, one with an error must not sum its gradients with the others"
    assert losses[0] == losses[1]
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)
    once = 4 + (2 if compute == "bf16" else 4)
    assert copied[1] == pytest.approx(3 * once, rel=0.1), "a weight twice, a gradient once"
    assert copied[0] > 1.5 * copied[1]


def test_two_ranks_that_keep_gathered_weights_train_the_same_bits(run: Run, ranks: Ranks) -> None:
    """In bf16, with context parallelism in the second stage."""
    run.recipe["precision"] = {"compute": "bf16"}
    run.recipe["stages"][1]["parallel"] = {"cp": 2}
    saved = []
    for number, changes in enumerate([{}, {"reshard_after_forward": False}]):
        run.recipe["run_dir"] = str(run.folder / f"changes {number}")
        run.recipe["parallel"] = changes
        ranks.train(run, 2)
        saved.append(run.newest_checkpoint)
    assert_same_tensors(*saved)


def gathered_at_the_loss(recipe: str) -> None:
    """Called on every rank: what FSDP still holds of its last gather in the loss is what plan counts."""
    config = load_config(recipe)
    stage = stages_of(config)[0]
    sizes = MeshSizes(dp_shard=2)
    planned = weights_of(config, sizes, work_of(config, stage, sizes)).copied
    unshard = FSDPParamGroup.unshard
    contexts: list[Any] = []
    found: set[int] = set()

    def noted(self: FSDPParamGroup, *given: bool) -> None:
        contexts.append(self.comm_ctx)
        unshard(self, *given)

    def looking(*given: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            found.add(contexts[-1].all_gather_state.all_gather_result.all_gather_output.nbytes)
        return chunk_loss(*given)

    with (
        patch.object(FSDPParamGroup, "unshard", noted),
        patch.object(transformer, "chunk_loss", looking),
    ):
        assert trainer_main([recipe]) == 0
    (held,) = found
    assert held == pytest.approx(planned, rel=0.02), "norms are counted elsewhere"


@pytest.mark.parametrize("tied", [False, True])
def test_plan_counts_what_fsdp_holds_of_its_last_gather_in_the_loss(tied: bool, run: Run, ranks: Ranks) -> None:
    """The output projection's unit, else the last block."""
    run.recipe["precision"] = {"compute": "bf16"}
    run.recipe["model"]["tie_embeddings"] = tied
    ranks.work(gathered_at_the_loss, [str(run.write_recipe())], 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_two_gpus_whose_weights_copy_engines_gather_train_the_same_bits(linear: str, run: Run) -> None:
    """With compiled blocks of a width at which copies and products overlap, several micro-batches and evaluations."""
    if linear == "fp8":
        pytest.importorskip("torchao")
    run.recipe |= {"deterministic": True, "compile": True, "precision": {"linear": linear}}
    run.recipe["model"] |= {"hidden_size": 1024, "intermediate_size": 4096, "layers": 6, "heads": 16, "kv_heads": 8}
    saved = []
    for by_copy_engines in (False, True):
        run.recipe["run_dir"] = str(run.folder / f"copy engines {by_copy_engines}")
        run.recipe["parallel"] = {"fsdp_copy_engines": by_copy_engines}
        code, output = run.train_on_gpu(2)
        assert code == 0, output
        saved.append(run.newest_checkpoint)
    assert_same_tensors(*saved)
