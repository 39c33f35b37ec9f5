"""The memory estimate: against measured peaks, and its parts against arithmetic."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from moba_train.attention.full.full_kind import FullKind
from moba_train.config.mesh import MeshSizes, WorldSize, mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.memory import layer_memory, moments
from moba_train.memory import memory as estimates
from moba_train.memory.activations import FILLED
from moba_train.memory.devices import H200, Device, Gpu
from moba_train.memory.moments import MEMORY_PARTS, Memory
from moba_train.memory.shortage import host_shortage, shortage
from moba_train.optim.registry import OPTIMIZERS
from moba_train.parallel import fsdp
from moba_train.parallel.activations import Kept, LayerActivations
from moba_train.parallel.context import policy
from moba_train.parallel.stage_strategy import stage_costs
from moba_train.parallel.transfers import REDUCTION_BUFFER
from moba_train.registry import ADAMW_KERNELS
from moba_train.resolve.recipe import resolve
from moba_train.run.summary import summarize
from tests.resolved import estimate_of, kept_by, plan_of, setup_of, spec_of, stages_of, weights_of, work_of

if TYPE_CHECKING:
    from moba_train.tools.plan.plan import StagePlan

ROOT = Path(__file__).parents[2]
FULL = {"default": "full"}
with_kernels = pytest.mark.skipif("deepspeed_cpu" not in ADAMW_KERNELS, reason="the core alone has torch's AdamW")
LLAMA_8B = 8_030_261_248
LLAMA_8B_BLOCK = 218_112_000
LAYERS = 32
Section = dict[str, Any]


def config(model: str, seq_len: str, attention: Section, **changes: Any) -> RunConfig:
    """A recipe with one stage of the model in configs/models."""
    recipe = {
        "name": "measured",
        "run_dir": "runs/measured",
        "model": yaml.safe_load((ROOT / f"configs/models/{model}.yaml").read_text())["model"],
        "data": {"train": [{"path": "a"}]},
        "stages": [{"name": "only", "seq_len": seq_len, "tokens": "16M"}],
        "attention": attention,
        **changes,
    }
    return RunConfig.model_validate(recipe)


def planned(model: str, world_size: int, *arguments: Any, **changes: Any) -> "StagePlan":
    """The plan of the only stage of `config`."""
    return plan_of(config(model, *arguments, **changes), world_size).stages[0]


def memory(*arguments: Any, **changes: Any) -> Memory:
    return planned(*arguments, **changes).memory


@pytest.fixture(autouse=True)
def implementations() -> Iterator[None]:
    """Implementations of AdamW with their state on the GPU and on its host; the core alone has none."""
    with ExitStack() as stack:
        for name, device in {"apex": None, "deepspeed_cpu": torch.device("cpu")}.items():
            if name not in ADAMW_KERNELS:
                stack.enter_context(ADAMW_KERNELS.registered(name, SimpleNamespace(state_device=device)))
        yield


@pytest.fixture
def logits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs were measured when the backward pass computed the logits again, where FSDP holds nothing of its last
    gather any more."""
    now = estimates.rank_weights
    monkeypatch.setattr(estimates, "rank_weights", lambda *given: replace(now(*given), copied=0))


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch, logits_twice: None) -> None:
    """These runs were measured before `compile: true` compiled the loss, and with feed-forwards of all rows at once."""
    monkeypatch.setattr(moments, "bytes_per_logit", lambda *_: 12)
    monkeypatch.setattr(layer_memory, "FEED_FORWARD_ROWS", 1 << 30)


def test_a_compiled_loss_needs_four_bytes_a_logit_in_place_of_twelve() -> None:
    """As benchmarks/results/loss-compare-h200.json measured: 3.06 GiB in place of 6.94 for 8K tokens of Llama-3-8B."""
    plain, compiled = (memory("llama3-8b", 8, "8K", FULL, batch_tokens="1M", compile=c) for c in (False, True))
    assert plain.moment == "loss"
    results = json.loads((ROOT / "benchmarks/results/loss-compare-h200.json").read_text())["results"]
    peaks = [results[name]["8192"]["peak_gib"] for name in ("ours", "ours, compiled chunk")]
    recipe = config("llama3-8b", "8K", FULL, compile=True, batch_tokens="16K")
    saved = (12 - moments.bytes_per_logit(setup_of(recipe).computation)) * 4096 * 128256
    assert saved / 2**30 == pytest.approx(peaks[0] - peaks[1], rel=0.02)
    assert compiled.total < plain.total


@pytest.mark.parametrize("parallel", [{"cp": 2}, {"cp": 2, "tp": 2}])
def test_a_feed_forward_in_parts_needs_memory_for_one_part(parallel: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the results of its products are recomputed; one part's widest tensors, and the parts' summed gradient."""
    policies = ("full", "selective")

    def peaks() -> list[int]:
        changes = {"batch_tokens": "512K", "parallel": parallel, "compile": True, "activation_offload": True}
        return [memory("llama3-8b", 8, "512K", FULL, activation_checkpointing=one, **changes).total for one in policies]

    in_parts = peaks()
    monkeypatch.setattr(layer_memory, "FEED_FORWARD_ROWS", 1 << 30)
    whole = peaks()
    assert in_parts[1] == whole[1]
    tokens, hidden, intermediate = 2**18 // parallel.get("tp", 1), 2 * 4096, 2 * 14336
    share = 1 - 2**15 / tokens
    assert whole[0] - in_parts[0] <= tokens * (share * (2 * hidden + 4 * intermediate) - hidden)
    assert whole[0] - in_parts[0] > tokens * intermediate


@pytest.mark.parametrize(
    ("measured", "seq_len", "attention", "changes"),
    [
        (88.3, "8K", FULL, {"batch_tokens": "16K"}),
        (71.0, "64K", FULL, {"batch_tokens": "64K", "parallel": {"cp": 2}, "activation_checkpointing": "full"}),
        (
            94.5,
            "128K",
            {"default": "moba", "moba": {"block_size": 512, "topk": 8}},
            {"batch_tokens": "128K", "parallel": {"cp": 2}, "activation_checkpointing": "full"},
        ),
    ],
    ids=["8K", "64K cp 2 recomputed", "128K cp 2 recomputed"],
)
def test_the_estimate_is_what_an_8b_model_took_on_two_h200(
    measured: float, seq_len: str, attention: Section, changes: Section, before: None
) -> None:
    """Peaks of torch.cuda.max_memory_allocated, as `memory_gib` in the metrics, at 94bc9b8, compiled, in GiB."""
    total = memory("llama3-8b", 2, seq_len, attention, compile=True, **changes).total
    assert total / 2**30 == pytest.approx(measured, rel=0.02)


def test_the_estimate_is_what_an_8b_model_takes_whose_loss_computes_its_logits_once() -> None:
    """The peak is the loss, inside the forward pass, until whose end FSDP holds the output weight as it has arrived."""
    results = json.loads((ROOT / "benchmarks/results/training-8b-8k-logits-once-h200-x2.json").read_text())["results"]
    found = memory("llama3-8b", 2, "8K", FULL, compile=True, batch_tokens="16K")
    assert found.moment == "loss"
    assert found.total / 2**30 == pytest.approx(results["8K:full:warm20:steps20"]["memory_gib"], rel=0.002)


@pytest.mark.parametrize(
    ("ranks", "parallel", "held"),
    [
        (1, {}, 0),
        (2, {}, 2 * 128256 * 4096),
        (4, {"tp": 2}, 128256 * 4096),
        (2, {"tp": 2}, 0),
        (2, {"fsdp_copy_engines": True}, 2 * 128256 * 4096),
        (4, {"pp": 2}, 0),
    ],
    ids=["one GPU", "two GPUs", "half of it with tp", "tp alone", "copy engines gather blocks only", "pipeline"],
)
def test_fsdp_holds_its_last_gather_in_the_loss_where_it_gathers_for_it(
    ranks: int, parallel: Section, held: int
) -> None:
    recipe = config("llama3-8b", "8K", FULL, batch_tokens="1M", parallel=parallel)
    (stage,) = stages_of(recipe)
    sizes = mesh_sizes(stage.parallel, ranks)
    work = work_of(recipe, stage, sizes, sizes.pp - 1)
    assert weights_of(recipe, sizes, work).copied == held


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        ("8K:full:none", {}),
        ("8K:full:none:fp8", {"linear": "fp8"}),
        ("8K:full:none:fp8-rowwise", {"linear": "fp8", "fp8": {"scaling": "rowwise"}}),
    ],
)
def test_the_estimate_is_what_an_8b_model_took_in_fp8(row: str, precision: Section, logits_twice: None) -> None:
    """FP8 keeps the inputs of projections in one byte an element, or not at all. Measured before weights stayed in FP8
    for a whole step, and before the output projection was a unit of FSDP of its own."""
    results = json.loads((ROOT / "benchmarks/results/training-8b-h200-x2.json").read_text())["results"]
    found = memory("llama3-8b", 2, "8K", FULL, compile=True, batch_tokens="16K", precision=precision)
    cast = found.parameters - memory("llama3-8b", 2, "8K", FULL, compile=True, batch_tokens="16K").parameters
    assert cast == (LAYERS * LLAMA_8B_BLOCK // 2 if row.endswith("fp8") else 0)  # one byte a weight of the blocks
    assert (found.total - cast) / 2**30 == pytest.approx(results[row]["memory_gib"], rel=0.01)


def test_weights_that_stay_gathered_take_the_memory_of_all_blocks() -> None:
    """In FP8, whose peak is the loss with them and without; those of a pipeline stay in any case."""
    for pp, more in ((1, LAYERS * LLAMA_8B_BLOCK), (2, 0)):
        again, once = (
            memory(
                "llama3-8b",
                2,
                "8K",
                FULL,
                compile=True,
                batch_tokens="16K",
                precision={"linear": "fp8"},
                parallel={"pp": pp, "reshard_after_forward": resharded},
            )
            for resharded in (True, False)
        )
        assert once.moment == again.moment
        assert once.total - again.total == more


@pytest.mark.parametrize("policy", ["none", "budget"])
def test_budget_keeps_the_weights_of_the_last_blocks_that_fit_beside_the_activations(policy: str) -> None:
    """And of none where even the activations do not fit."""
    recipe = config(
        "llama3-8b",
        "8K",
        FULL,
        batch_tokens="16K",
        activation_checkpointing=policy,
        parallel={"reshard_after_forward": "budget"},
    )
    (stage,) = stages_of(recipe)
    sizes = mesh_sizes(stage.parallel, 2)
    estimate = estimate_of(recipe, stage, sizes)
    everything = [LayerActivations(Kept.ALL)] * 32
    limit = estimate.reserved(everything) + 7.5 * 2 * LLAMA_8B_BLOCK
    found = kept_by(recipe, stage, sizes, limit / FILLED, None)
    assert [layer.weights for layer in found.layers] == [False] * 25 + [True] * 7
    assert found.keeps_everything
    assert "layers 25-31: nothing recomputed, with gathered weights" in found.describe()
    assert estimate.peak(found.layers).total - estimate.peak(everything).total == 7 * 2 * LLAMA_8B_BLOCK
    for gpu_bytes, stay in ((None, True), (2**30, False)):
        found = kept_by(recipe, stage, sizes, gpu_bytes, None)
        assert {layer.weights for layer in found.layers} == {stay}


def test_copy_engines_take_the_memory_of_two_gathered_blocks_and_of_gradients() -> None:
    """On one GPU nothing travels."""
    for gpus, more in ((2, 2 * 2 * LLAMA_8B_BLOCK + REDUCTION_BUFFER), (1, 0)):
        by_nccl, by_copy_engines = (
            memory("llama3-8b", gpus, "8K", FULL, batch_tokens="16K", parallel={"fsdp_copy_engines": given})
            for given in (False, True)
        )
        assert by_copy_engines.moment == by_nccl.moment
        assert by_copy_engines.total - by_nccl.total == more


MOBA = {"full_layers": "last:3", "moba": {"block_size": 512, "topk": 3}}
VARIANTS: dict[str, Section] = {
    "full": {"attention": FULL},
    "full, recomputed": {"attention": FULL, "activation_checkpointing": "full"},
    "full, compiled": {"attention": FULL, "compile": True},
    "MoBA 512/3, last 3 full": {"attention": MOBA},
    "MoBA 512/3, last 3 full, compiled": {"attention": MOBA, "compile": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_estimate_is_what_a_1b_model_took_in_the_result_file(variant: str, before: None) -> None:
    results = json.loads((ROOT / "benchmarks/results/training-1b-h200.json").read_text())
    assert set(results["results"]) == set(VARIANTS)
    assert (results["settings"]["seq_len"], results["settings"]["sequences_per_gpu"]) == (8192, 2)
    changes: Section = {"micro_batch_size": 2, "batch_tokens": "16K", **VARIANTS[variant]}
    total = memory("llama-1b", 1, "8K", **changes).total
    assert total / 2**30 == pytest.approx(results["results"][variant]["memory_gib"]["median"], rel=0.01)


def test_master_weights_gradients_and_adamw_are_16_bytes_a_parameter_over_the_shards_once_steps_accumulate() -> None:
    for ranks in (1, 4, 8):
        found = memory("llama3-8b", ranks, "8K", FULL, batch_tokens="1M")
        states = found.parameters + found.gradients + found.optimizer
        assert states == pytest.approx(16 * LLAMA_8B / ranks)
    single = memory("llama3-8b", 8, "8K", FULL, batch_tokens="64K")
    assert (single.moment, single.gradients) == ("loss", 0), "no gradients exist before the backward pass"
    replicated = memory("llama3-8b", 8, "8K", FULL, batch_tokens="1M", parallel={"dp_replicate": 4})
    assert replicated.parameters == pytest.approx(4 * LLAMA_8B / 2)


def test_a_small_model_on_one_gpu_has_all_its_weights_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks() -> list[Memory]:
        recipe = config("mini", "8K", FULL, batch_tokens="8K")
        stage = stages_of(recipe)[0]
        estimate = estimate_of(recipe, stage, MeshSizes())
        return [estimate.peak([LayerActivations(kept)] * recipe.model.layers) for kept in (Kept.INPUT, Kept.ALL)]

    at_once = peaks()
    monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", 0)
    by_block = peaks()
    blocks = spec_of(config("mini", "8K", FULL, batch_tokens="8K")).counts.without_embeddings
    for small, large in zip(by_block, at_once, strict=True):
        assert 0 < large.unsharded - small.unsharded <= 2 * blocks
        assert large.total - small.total < 10 * blocks, "bf16 weights and gradients, and a float32 copy to reduce"


def test_activation_checkpointing_keeps_each_blocks_input_and_attention() -> None:
    tokens = 8192
    hidden = 2 * 4096 * tokens
    kept = memory("llama3-8b", 8, "8K", FULL, batch_tokens="1M").activations - 2 * hidden
    recomputed = memory("llama3-8b", 8, "8K", FULL, batch_tokens="1M", activation_checkpointing="full")
    assert recomputed.moment == "loss"
    assert recomputed.activations - 2 * hidden == LAYERS * (2 * hidden + 4 * 32 * tokens) < kept / 3


def test_logits_exist_for_a_chunk_of_tokens_only() -> None:
    short, long = (memory("llama3-8b", 8, length, FULL, batch_tokens="1M") for length in ("8K", "32K"))
    row = 2 * 4096  # bf16: the gradient of a token's input of the loss
    assert short.working - row * 8192 == long.working - row * 32768 < 8 * 2**30


def test_blocks_that_moba_selects_are_kept_for_the_backward_pass() -> None:
    moba = {"full_layers": "last:3", "moba": {"block_size": 4096, "topk": 3}}
    full, chosen = (memory("llama3-8b", 8, "128K", kind, batch_tokens="1M") for kind in (FULL, moba))
    assert full.moment == chosen.moment
    ids = 29 * 2 * 4 * 32 * 2 * 131072  # 2 of 3 block ids and their inverse, int32, in 29 MoBA layers
    assert chosen.activations - full.activations == ids


def test_a_kinds_own_activations_are_kept_for_all_layers_or_recomputed_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is in the last block: it moves there with so many activations."""
    tokens, own = 8192, 10**6
    token_bytes = FullKind.token_bytes
    found = {}
    for checkpointing in ("none", "full"):
        before = memory("llama-1b", 1, "8K", FULL, batch_tokens="8K", activation_checkpointing=checkpointing)
        with monkeypatch.context() as patch:
            patch.setattr(FullKind, "token_bytes", lambda *given: token_bytes(*given)._replace(activations=own))
            after = memory("llama-1b", 1, "8K", FULL, batch_tokens="8K", activation_checkpointing=checkpointing)
        found[checkpointing] = (after.activations - before.activations) / (tokens * own)
    assert found["none"] == pytest.approx(16, rel=0.05)
    assert found["full"] == pytest.approx(1, rel=0.1)


def test_buffers_of_context_parallelism_count_in_attention_and_nowhere_else() -> None:
    """With one block, whose SwiGLU is small, attention is the peak."""
    heads = {"heads": 32, "kv_heads": 32, "head_dim": 128}
    narrow = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "layers": 1, **heads}
    recipe = config("tiny", "64K", FULL, batch_tokens="64K", parallel={"cp": 8})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=narrow)})
    stage = plan_of(recipe, 8).stages[0]
    assert stage.memory.moment == "first attention"
    assert stage.layout.strategy is not None
    (cost,) = stage_costs(recipe.model, stage.stage, stage.layout.strategy).values()
    assert stage.memory.transport == cost.memory_bytes > 0
    assert stage.memory.total == sum(getattr(stage.memory, part) for part in MEMORY_PARTS)


def test_the_workspace_of_kernels_counts_in_attention_and_slices_divide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks: packed queries, packed gradients and partial gradients of queries, in bf16, of the heads of a slice."""
    heads = {"heads": 32, "kv_heads": 32, "head_dim": 128}
    narrow = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "layers": 1, **heads}
    found = {}
    for slices in (1, 4):
        monkeypatch.setattr(policy._Choice, "fits", lambda self, strategy, fits=slices == 1: fits)
        parallel = {"cp": 8, "cp_transport": "allgather"}
        moba = {"default": "moba", "moba": {"block_size": 512, "topk": 8}}
        recipe = config("tiny", "64K", moba, batch_tokens="64K", parallel=parallel)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=narrow)})
        found[slices] = plan_of(recipe, 8).stages[0].memory
        assert found[slices].moment == "first attention"
    queries = 2 * 32 * 128 * (65536 // 8)
    assert found[1].working - found[4].working == round(0.75 * 3 * queries)


def test_a_stage_that_does_not_fit_the_gpu_is_named() -> None:
    stage = planned("llama3-8b", 2, "8K", FULL, batch_tokens="16K")
    for gibibytes, fits in ((80, False), (141, True)):
        found = shortage("only", stage.memory, Gpu("a GPU", None, gibibytes * 2**30))
        assert (found is None) == fits
        assert found is None or f"stage only needs about {stage.memory.total / 2**30:.1f} GiB" in found


@with_kernels
def test_optimizer_state_is_that_of_the_optimizer_and_may_be_in_host_memory() -> None:
    """Muon keeps one number for each of the blocks' 6,979,321,856 weights in matrices, AdamW two for any."""

    def state(**optim: Any) -> tuple[int, int]:
        found = memory("llama3-8b", 2, "8K", FULL, batch_tokens="16K", optim=optim)
        return found.optimizer, found.host_optimizer

    adamw = 8 * LLAMA_8B // 2
    assert state() == state(implementation="apex") == (adamw, 0)
    if "muon" in OPTIMIZERS:
        assert state(kind="muon") == (adamw - 4 * 6_979_321_856 // 2, 0)
    assert state(implementation="deepspeed_cpu") == (0, adamw)


@with_kernels
def test_an_8b_model_fits_on_one_h200_with_its_optimizer_in_host_memory() -> None:
    """Weights and gradients take 64 GB, AdamW's state as much again."""
    one = {"batch_tokens": "8K", "activation_checkpointing": "full", "compile": True}
    on_gpu = memory("llama3-8b", 1, "8K", FULL, **one).total
    on_host = memory("llama3-8b", 1, "8K", FULL, **one, optim={"implementation": "deepspeed_cpu"}).total
    assert on_gpu - on_host == 8 * LLAMA_8B
    assert on_host < 0.9 * 141e9 < on_gpu


@with_kernels
def test_a_1b_model_fits_in_16_gib_with_its_optimizer_in_host_memory() -> None:
    one = {"batch_tokens": "4K", "activation_checkpointing": "full", "compile": True}
    on_host = memory("llama-1b", 1, "4K", FULL, **one, optim={"implementation": "deepspeed_cpu"}).total
    assert on_host < 16 * 2**30


@with_kernels
def test_offloaded_activations_leave_room_on_the_host_for_saves_and_the_optimizer() -> None:
    """The host takes as many layers, the last one left out, as there is room for beside the copy of a save, which is of
    weights and AdamW's state, and beside that state."""

    def offloaded(host_gib: float, every: int | None, **optim: Any) -> int:
        changes = {"batch_tokens": "8K", "activation_offload": True, "optim": optim, "memory": {"gpu_gib": 1}}
        recipe = config("llama-1b", "8K", FULL, checkpoint={"every": every}, **changes)
        layers = plan_of(recipe, 1, host_bytes=host_gib * 2**30).stages[0].activations.layers
        return sum(layer.on_host for layer in layers)

    state = memory("llama-1b", 1, "8K", FULL, batch_tokens="8K").optimizer / 2**30
    assert offloaded(1, None) == offloaded(1 + state, None, implementation="deepspeed_cpu") > 0
    assert offloaded(1, None, implementation="deepspeed_cpu") == 0
    assert offloaded(1 + 1.5 * state, 100) == offloaded(1, None)
    assert offloaded(1 + 2.5 * state, 100, implementation="deepspeed_cpu") == offloaded(1, None)
    assert offloaded(1 + state, 100) == 0


def test_the_copy_of_a_save_is_as_large_as_the_rank_s_part_of_the_checkpoint() -> None:
    """89.75 GiB on two ranks (benchmarks/results/checkpoint-layouts-8b-h200-x2.json)."""
    two = {"batch_tokens": "16K"}
    assert memory("llama3-8b", 2, "8K", FULL, **two).host_copies == 12 * LLAMA_8B // 2
    assert abs(2 * 12 * LLAMA_8B // 2 / 2**30 - 89.75) < 0.05
    assert memory("llama3-8b", 2, "8K", FULL, checkpoint={"every": None}, **two).host_copies == 0


def test_a_host_with_too_little_memory_is_named_with_what_takes_it() -> None:
    changes = {"batch_tokens": "16K", "activation_offload": True, "activation_checkpointing": "full"}
    plan = plan_of(config("llama3-8b", "8K", FULL, **changes), 2)
    copies, kept = 12 * LLAMA_8B // 2, plan.stages[0].activations.host_bytes
    needs = {"only": plan.stages[0].activations}
    assert host_shortage(needs, copies + kept) is None
    missing = host_shortage(needs, copies + kept - 1) or ""
    assert missing.startswith(f"stage only needs about {(copies + kept) / 2**30:.1f} GiB of host memory for each GPU")
    assert f"(the copy of a save 44.9, activations {kept / 2**30:.1f}), but this machine has" in missing
    assert missing.endswith("lower memory.host_gib or use more machines")
    without = plan_of(config("llama3-8b", "8K", FULL, batch_tokens="16K"), 2)
    alone = host_shortage({"only": without.stages[0].activations}, copies - 1) or ""
    assert alone.endswith("take more; use more machines"), "memory.host_gib is refused without activation_offload"


@pytest.mark.parametrize(("host_gib", "warned"), [(40, True), (45, False)])
def test_a_run_says_first_that_its_host_has_too_little_memory(host_gib: int, warned: bool) -> None:
    """Before the copy is allocated, in which Linux may kill it."""
    device = Device(H200, host_gib * 2**30)
    text = summarize(resolve(config("llama3-8b", "8K", FULL, batch_tokens="16K"), WorldSize(2, 2), device))
    assert (
        "warning: stage only needs about 44.9 GiB of host memory for each GPU (the copy of a save" in text
    ) == warned


def test_budget_leaves_room_for_gradients_that_come_later() -> None:
    """Where it left less, torch waited for the GPU 8 times in 5 steps (128K in
    benchmarks/results/training-8b-16-layers-long-h100-x2.json). The peak is below by the gradients: they come as
    activations go."""
    recipe = config(
        "llama3-8b",
        "128K",
        FULL,
        batch_tokens="128K",
        parallel={"cp": 2},
        compile=True,
        activation_checkpointing="budget",
    )
    (stage,) = stages_of(recipe)
    sizes = mesh_sizes(stage.parallel, 2)
    estimate = estimate_of(recipe, stage, sizes)
    limit = 115 * 2**30
    found = kept_by(recipe, stage, sizes, limit / FILLED, None)
    assert found.memory.gradients == 0
    gradients = found.memory.parameters  # both are float32
    assert estimate.reserved(found.layers) == found.memory.total + gradients
    assert limit - 2**30 < estimate.reserved(found.layers) <= limit


def test_the_line_that_memory_md_quotes_is_that_of_plan() -> None:
    changes = {"batch_tokens": "128K", "parallel": {"cp": 2}, "compile": True}
    recipe = config("llama3-8b", "128K", {"default": "moba", "moba": {"block_size": 512, "topk": 8}}, **changes)
    (stage,) = plan_of(recipe, 2, gpu_bytes=H200.memory).stages
    assert f"\n```\n{stage.activations.describe()}\n```\n" in (ROOT / "docs/how-to/out-of-memory.md").read_text()
