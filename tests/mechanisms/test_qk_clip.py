"""QK-clip and the bound of attention logits that it goes by: against logits in float64, on any layout, in runs."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import packed_layout
from moba_train.config.attention import LayerAttention
from moba_train.config.load import load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.config.model import ModelConfig
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.mechanisms.muon.qk_clip import clip
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients
from moba_train.parallel.largest_lse import LargestLse
from moba_train.parallel.world import joined_world
from moba_train.run.step import StepLosses, StepResult
from tests.gradients import full_tensor
from tests.resolve.refusals import assert_refused
from tests.resolved import shard_of, sharded_of, stages_of
from tests.run.faults import inject, scaled_gradient, steady
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks, train_traced
from tests.small_recipe import Load

LENGTHS = [50, 30, 48]
HEADS = 4


def model_of(kv_heads: int, **keys: Any) -> Transformer:
    """A float64 model with attention of logits far from zero."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": HEADS, "head_dim": 8}
    config = ModelConfig.model_validate(shape | {"kv_heads": kv_heads, "init_std": 0.4, "qkv_bias": True, **keys})
    model = Transformer(config).double()
    initialize_weights(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return model


def largest_logits(model: Transformer, inputs: tuple[Any, ...]) -> Tensor:
    """Largest logit of each layer and head, [layers, H], by the definition of full attention."""
    found = []

    class Looking:
        observers = ()

        def __call__(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, attention: Any, layout: Any) -> Any:
            documents = layout.documents(torch.arange(len(q_THd)))
            seen = (documents[:, None] == documents) & torch.ones(len(q_THd), len(q_THd)).tril().bool()
            k_THd = k_TKd.repeat_interleave(q_THd.shape[1] // k_TKd.shape[1], 1)
            scores = torch.einsum("thd,shd->hts", q_THd, k_THd) / q_THd.shape[2] ** 0.5
            scores = scores.masked_fill(~seen, -math.inf)
            found.append(scores.amax((1, 2)))
            out = torch.einsum("hts,shd->thd", scores.softmax(-1), v_TKd.repeat_interleave(HEADS // v_TKd.shape[1], 1))
            return out, scores.logsumexp(-1)

    model.set_engines([Looking()] * model.config.layers)  # type: ignore[list-item]  # enough for full attention
    with torch.no_grad():
        model(*inputs)
    return torch.stack(found)


def full(layers: int, head_dim: int) -> Any:
    return build_attention([LayerAttention("full", FullAttention.Options())] * layers, head_dim)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_after_the_clip_no_logit_exceeds_the_threshold(kv_heads: int) -> None:
    model = model_of(kv_heads)
    model.set_attention(full(2, 8))
    tokens = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    inputs = tokens, torch.cat([torch.arange(n) for n in LENGTHS]), packed_layout(LENGTHS)
    before = largest_logits(model, inputs)
    threshold = before[0].median().item()
    weights = {name: value.clone() for name, value in model.named_parameters()}
    bounds = before.clone()
    bounds[1] = -math.inf  # not noted
    clip(model, bounds, threshold)
    after = largest_logits(model, inputs)
    torch.testing.assert_close(after[0], before[0].clamp(max=threshold), rtol=1e-9, atol=1e-9)
    clipped = before[0] > threshold
    assert 0 < clipped.sum() < HEADS
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, weights[name])}
    projections = ("q_proj",) if kv_heads < HEADS else ("q_proj", "k_proj")
    assert changed == {f"blocks.0.attention.{name}.{end}" for name in projections for end in ("weight", "bias")}
    for name in changed:
        rows = (model.get_parameter(name) != weights[name]).view(HEADS, -1).any(1)
        assert torch.equal(rows, clipped), "rows of other heads keep their bits"


def noted(recipe: str, out: str) -> None:
    """Work of a rank: the bounds after one step's forward and backward passes, then the clip; rank 0 saves both."""
    with joined_world(timedelta(seconds=60)) as world:
        config = load_config(recipe)
        (stage,) = stages_of(config)
        dims = ParallelDims(mesh_sizes(config.parallel, world.size), world)
        model = sharded_of(config, dims)
        model.set_attention(build_attention(stage.attention, config.model.head_width))
        shard = shard_of(config, stage, dims)
        if shard.engine:
            model.set_engines([shard.engine] * config.model.layers)
        count = stage.batch_sequences
        data = StageData(stage.sources, stage.seq_len, count, 0, {}, config.model.vocab_size, "concat", "token")
        loaded = step_batches(data, 0, count, stage.micro_batch_size, shard.dp_rank, shard.dp_size)
        batches = [shard.shard_batch(batch) for batch in loaded]
        model.largest_lse.begin_step()
        for _ in accumulate_gradients(model, batches, 100.0):
            pass
        bounds = model.largest_lse.over_ranks()
        clip(model, bounds, 0.6 * bounds.max().item())
        found = {name: full_tensor(parameter) for name, parameter in model.named_parameters() if "q_proj" in name}
        if world.is_main:
            torch.save({"bounds": bounds, **found}, out)


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "alone": (1, {}),
    "cp 2, dp 2": (4, {"cp": 2, "dp_shard": 2}),
    "tp 2, shards 2": (4, {"tp": 2, "dp_shard": 2}),
}


def test_the_bound_and_the_clip_do_not_depend_on_the_layout(run: Run, tmp_path: Path, ranks: Ranks) -> None:
    run.recipe["model"]["init_std"] = 0.3
    run.recipe["stages"] = [run.recipe["stages"][1]]
    found = {}
    for name, (size, parallel) in LAYOUTS.items():
        run.recipe["parallel"] = parallel
        ranks.work(noted, [str(run.write_recipe()), str(tmp_path / name)], size)
        found[name] = torch.load(tmp_path / name)
    alone = found.pop("alone")
    assert (alone["bounds"] > 1).all()
    for values in found.values():
        for name, value in alone.items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-4)


def test_the_bound_is_above_the_largest_logit_by_no_more_than_the_keys_allow() -> None:
    model = model_of(2)
    model.set_attention(full(2, 8))
    tokens = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    inputs = tokens, torch.cat([torch.arange(n) for n in LENGTHS]), packed_layout(LENGTHS)
    logits = largest_logits(model, inputs)
    model.set_engines([LOCAL_ENGINE] * 2)
    largest = LargestLse(model, 1, 0, torch.float64, torch.device("cpu"))
    model(*inputs)
    bounds = largest.over_ranks()
    assert ((bounds > logits) & (bounds < logits + math.log(max(LENGTHS)))).all()
    largest.begin_step()
    with torch.no_grad():
        model(*inputs)
    assert (largest.over_ranks() == -math.inf).all(), "evaluations note nothing"


@pytest.mark.parametrize("keys", [{}, {"compile": True, "activation_checkpointing": "full"}], ids=["", "compiled"])
def test_a_run_with_muon_brings_its_logits_down_to_the_threshold(run: Run, keys: dict[str, Any]) -> None:
    """Each batch has a largest logit of its own, so a little more than the threshold is left in the next."""
    run.recipe["model"]["init_std"] = 0.5
    run.recipe["optim"] = {"kind": "muon", "lr": 1e-3, "muon": {"qk_clip": 12.0}}
    run.recipe["stages"] = run.recipe["stages"][:1]
    run.recipe |= keys
    run.use_short_documents()
    assert train_traced(str(run.write_recipe())) == 0
    found = [record["max_lse"] for record in run.records()]
    assert found[0] == pytest.approx(49.85136, rel=1e-4)
    assert max(found[1:]) < 18


def test_the_first_suspect_of_a_spike_is_a_large_logit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, {18: scaled_gradient})
    steady(run, "log", 19)
    monkeypatch.setattr("moba_train.parallel.largest_lse.SUSPECT", 1.0)
    assert run.train_here() == 0
    (spike, *_) = run.records("spike")
    dump = run.dump(spike["step"])
    bounds = torch.tensor(dump["max_lse_of_heads"])
    layer, head = divmod(int(bounds.argmax()), HEADS)
    text = f"first suspect: attention logits of about {bounds.max().item():.4g} in layer {layer}, head {head}"
    assert text in spike["message"]
    assert text in dump["message"]


def test_layers_that_note_nothing_log_nothing() -> None:
    zero = torch.zeros(())
    numbers = {"max_lse": torch.tensor(-math.inf), "grad_norm_nsa": torch.tensor(2.0)}
    assert StepResult.read(StepLosses(torch.device("cpu")), zero, zero, numbers).further == {"grad_norm_nsa": 2.0}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.qk_norm=true"], "optim.muon.qk_clip: given 100 with model.qk_norm, whose norms bound"),
        (["adapters.lora={}"], "optim.muon.qk_clip: given 100 with adapters"),
        (  # would shrink the weights in every step
            ["optim.muon.qk_clip=9"],
            "optim.muon.qk_clip: given 9, which equal logits near 0 exceed by max_lse; allowed: above ln(seq_len), 9.0",
        ),
        (
            ["stages.1.attention.default=nsa"],
            "optim.muon.qk_clip: given 100 with attention kind 'nsa' in stages[1], whose logits are not known",
        ),
    ],
)
def test_logits_that_cannot_be_clipped_are_refused_by_key(load: Load, overrides: list[str], problem: str) -> None:
    assert_refused(load("optim.kind=muon", "optim.muon.qk_clip=100", *overrides), problem)
