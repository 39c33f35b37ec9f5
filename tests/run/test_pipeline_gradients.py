"""A pipeline changes where layers live and when they run, not what is computed: loss, every gradient, its norms and the
auxiliary losses are those of the whole model on one device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moba_train.config.mesh import mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.data.batch import Batch, collate
from moba_train.data.samples import Sample
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.model.feed_forward import each_kind
from moba_train.model.loss import CompiledChunkLoss
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import Gradients
from moba_train.optim.spec import set_trainable
from moba_train.parallel.activations import Kept, LayerActivations, set_activations
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients, most_likely_tokens, token_losses
from moba_train.parallel.pipeline import schedule
from moba_train.parallel.world import gather, joined_world
from tests.attention.helpers import labelled
from tests.resolved import shard_of, sharded_of, spec_of, stages_of
from tests.run.trainer_ranks import Ranks

SEQ_LEN, MICRO_BATCHES = 48, 4
SPARSE = {"default": "moba", "full_layers": "last:1", "moba": {"block_size": 8, "topk": 2}}
Found = dict[str, Tensor]
Model = dict[str, Any]
"""Section `attention` and, where they are not the default: `tied`, `trainable`, `precision`, `kept`: what the layers
keep, `compiled`, `compiled_loss`, `further` keys of the section `model`."""
Case = tuple[Model, dict[str, Any]]
"""A model and the section `parallel`."""

MOBA: Model = {"attention": SPARSE}
TIED: Model = {"attention": SPARSE, "tied": True}
RECOMPUTED: Model = TIED | {"kept": (Kept.INPUT, Kept.ATTENTION, Kept.PRODUCTS, Kept.ALL), "compiled_loss": True}
TWO_RANKS: dict[str, Case] = {
    "1f1b": (MOBA, {"pp": 2}),
    "uneven, tied": (RECOMPUTED, {"pp": 2, "pp_layers": [1, 3]}),
    "interleaved": (TIED, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    "zero bubble": (TIED, {"pp": 2, "pp_schedule": "zero_bubble"}),
}
FOUR_RANKS: dict[str, Case] = {
    "pp 4": (RECOMPUTED, {"pp": 4}),
    "pp 2 and cp 2": (MOBA, {"pp": 2, "cp": 2}),
    "pp 2 and tp 2": (RECOMPUTED, {"pp": 2, "tp": 2}),
    "pp 2 and dp 2, zero bubble": (TIED, {"pp": 2, "pp_schedule": "zero_bubble"}),
    "pp 2 and replicas, interleaved": (
        RECOMPUTED,
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp_replicate": 2},
    ),
}


def recipe(model: Model, parallel: dict[str, Any]) -> RunConfig:
    sizes = {"vocab_size": 36, "hidden_size": 24, "intermediate_size": 28, "layers": 4, "heads": 4, "kv_heads": 2}
    return RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": "unused",
            "model": {**sizes, "head_dim": 16, "init_std": 0.2, "tie_embeddings": model.get("tied", False)}
            | model.get("further", {}),
            "attention": model["attention"],
            "data": {"train": [{"path": "unused"}]},
            "batch_tokens": SEQ_LEN * MICRO_BATCHES,
            "stages": [
                {
                    "name": "only",
                    "seq_len": SEQ_LEN,
                    "tokens": 1000,
                    "trainable": model.get("trainable", "all"),
                }
            ],
            "parallel": parallel,
            "precision": model.get("precision", {}),
            "compile": model.get("compiled", False),
        }
    )


def kept_by(model: Model) -> list[LayerActivations]:
    """What each layer of the whole model keeps for its backward pass."""
    return [LayerActivations(kept) for kept in model.get("kept", [Kept.ALL] * 4)]


def drawn_samples() -> list[Sample]:
    """Documents of other lengths in each; loss on some tokens, in the third on none at all."""
    rng, made = np.random.default_rng(0), []
    for place, lengths in enumerate(([30, 18], [5, 40, 3], [48], [1, 46, 1])):
        tokens = rng.integers(36, size=SEQ_LEN + 1)
        weight = (rng.random(SEQ_LEN) < (0, 0.05, 0.4)[place % 3]).astype(np.float32)
        made.append(Sample(tokens[:-1], tokens[1:], weight, lengths, []))
    return made


def results(model: Transformer, config: RunConfig, shard: DataShard, repeat: int = 1) -> Found:
    """What a step gives: gradients as they are on this rank, all else summed over the ranks."""
    (stage,) = stages_of(config)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    set_trainable(model, stage.trainable)
    whole = [collate([sample]) for sample in drawn_samples()]
    batches = [shard.shard_batch(batch) for batch in whole[shard.dp_rank :: shard.dp_size]]
    weight = sum(batch.loss_weight_sum for batch in whole)
    for _ in range(repeat):  # a second step has its own batches, and gathers the weights anew
        model.zero_grad()
        for steps, _, modules in each_kind(model):
            steps.begin(modules)
        parts = list(accumulate_gradients(model, batches, weight))
    loss = sum(part.loss.detach() for part in parts)
    assert isinstance(loss, Tensor)
    found: Found = {"loss": loss}
    auxiliary = [part.auxiliary.detach() for part in parts if part.auxiliary is not None]
    if auxiliary:
        found["auxiliary"] = torch.stack(auxiliary).sum(0)
    # What evaluations ask for, by the token of the sequence; counted once.
    own = shard.shard_batch(whole[1])
    places_n = token_places(own, shard)
    counted_n = (own.loss_weight > 0) & (shard.dp_rank == 0)
    for name, values_n in (("token losses", token_losses(model, own)), ("most likely", most_likely_tokens(model, own))):
        found[name] = torch.zeros(SEQ_LEN)
        found[name][places_n[counted_n]] = values_n[counted_n].float()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the outermost one gathered, and without gradients
    if dist.is_initialized():
        for value in found.values():
            dist.all_reduce(value)
    for steps, options, modules in each_kind(model):
        found |= steps.measure(modules, options, config.model.layers, torch.device("cpu"), 1)
    norms = (
        Gradients(model).norms_by_kind(stage.kinds) | {"norm": Gradients(model).norm()} if dist.is_initialized() else {}
    )
    return found | {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None} | norms


def token_places(batch: Batch, shard: DataShard) -> Tensor:
    """The token of the whole sequence that each row of `loss_index` is."""
    tokens_T = torch.arange(batch.layout.total)
    if shard.engine is not None:
        tokens_T = shard.engine.sequence(batch.layout.total).shard(tokens_T, shard.engine.rank)
    return tokens_T[batch.loss_index]


def worker(cases: list[Case], output: str) -> None:
    """All cases on the ranks of this world; rank 0 writes what they give."""
    torch.compiler.reset()
    with joined_world() as world:
        every = []
        for options, parallel in cases:
            config = recipe(options, parallel)
            (stage,) = stages_of(config)
            sizes = mesh_sizes(stage.parallel, world.size)
            dims = ParallelDims(sizes, world, stage.parallel.ep)
            model = sharded_of(config, dims)
            shard = shard_of(config, stage, dims)
            for steps, section, modules in each_kind(model):
                steps.enter(modules, section, dims, sizes, stage, shard)
            set_activations(model, kept_by(options), world.device)
            if options.get("compiled_loss"):
                model.chunk_loss = CompiledChunkLoss(backend="aot_eager")
            if shard.engine is not None:
                model.set_engines([shard.engine] * config.model.layers)
            sharded = sizes.dp_replicate * sizes.dp_shard * sizes.cp > 1
            repeated = world.size == 2 or (sharded and world.size == 4)  # more take as long as all these together
            found = results(model, config, shard, repeat=2 if repeated else 1)
            layers, ends = Gradients(model).norms_by_module()
            found |= {f"norm of layer {i}": torch.tensor(norm) for i, norm in enumerate(layers)}
            found |= {f"norm of {name}": torch.tensor(norm) for name, norm in ends.items()}
            mine = {
                name: (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
                for name, value in found.items()
            }
            whole: Found = {}
            for name, value in (item for of_rank in gather(mine) for item in of_rank.items()):
                assert torch.equal(whole.setdefault(name, value), value), f"{name} differs between ranks"
            every.append(whole)
        if world.is_main:
            torch.save(every, output)


def on_one_device(options: Model) -> Found:
    config = recipe(options, {})
    model = build_model(spec_of(config))
    initialize_weights(model, config.seed)
    found = results(model, config, DataShard())
    square = {name: p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}

    def norm(*prefixes: str) -> Tensor:
        return sum((s for name, s in square.items() if name.startswith(prefixes)), start=torch.zeros(())).sqrt()

    (stage,) = stages_of(config)
    found["norm"] = norm("")
    for kind in sorted(set(stage.kinds)):
        layers = [layer for layer, other in enumerate(stage.kinds) if other == kind]
        found[f"grad_norm_{kind}"] = norm(*(f"blocks.{layer}." for layer in layers))
    found |= {f"norm of layer {layer}": norm(f"blocks.{layer}.") for layer in range(config.model.layers)}
    ends = ("embedding", "norm") + (() if config.model.tie_embeddings else ("output",))
    return found | {f"norm of {name}": norm(f"{name}.") for name in ends}


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Found]:
    """Results of the cases in the file that collects the test."""
    every: dict[str, Found] = {}
    for count, cases in ((2, request.module.TWO_RANKS), (4, request.module.FOUR_RANKS)):
        output = tmp_path_factory.mktemp("pipeline") / "results.pt"
        ranks.work(worker, (list(cases.values()), str(output)), count)
        every |= dict(zip(cases, torch.load(output, weights_only=True), strict=True))
    return every


def assert_equal(got: Found, want: Found) -> None:
    """The same things are found, and are equal up to rounding."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(got[key], value, **tolerance, msg=labelled(key))


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_it_computes_what_one_device_does(name: str, found: dict[str, Found]) -> None:
    model, _ = (TWO_RANKS | FOUR_RANKS)[name]
    assert_equal(found[name], on_one_device(model))


def compiling_worker(options: Model, output: str) -> None:
    """Steps with and without the passes that compile, and what ran in them, in order."""
    steps = []
    for compiles in (True, False):
        with joined_world() as world:
            config = recipe(options, {"pp": 2, "pp_schedule": "interleaved_1f1b"})
            (stage,) = stages_of(config)
            dims = ParallelDims(mesh_sizes(stage.parallel, world.size), world)
            model = sharded_of(config, dims)
            ran = list[str]()
            with pytest.MonkeyPatch.context() as patch:
                for owner, name in ((model, "run_part"), (schedule.TrainingSchedule, "run")):
                    patch.setattr(owner, name, noted(getattr(owner, name), ran))
                if not compiles:
                    patch.setattr(schedule, "_compile_parts", lambda *_: None)
                shard = shard_of(config, stage, dims)
                for _ in range(2):
                    found = results(model, config, shard, repeat=2)
            steps.append((ran, {name: getattr(value, "_local_tensor", value) for name, value in found.items()}))
    torch.save(steps, f"{output}-{world.rank}.pt")


def noted(function: Any, names: list[str]) -> Any:
    """The function, which adds its name to `names` where it is called."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        names.append(function.__name__)
        return function(*arguments, **keywords)

    return call


def test_all_ranks_run_their_parts_before_the_first_step_which_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    assert_compiling_changes_no_bit(TIED, ranks, tmp_path)


def assert_compiling_changes_no_bit(options: Model, ranks: Ranks, tmp_path: Path) -> None:
    """Each rank runs its parts once before the first step, and then finds what it finds without these passes."""
    ranks.work(compiling_worker, (options, str(tmp_path / "rank")), 2)
    for rank in range(2):
        (ran, compiled), (ran_without, plain) = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        step = ["run", *["run_part"] * 2 * MICRO_BATCHES]
        assert ran == (["run_part"] * 2 + step + step) * 2, "in the first of two steps, and again once attention is set"
        assert ran_without == step * 4
        assert compiled.keys() == plain.keys()
        for name, value in plain.items():
            assert torch.equal(compiled[name], value), name
