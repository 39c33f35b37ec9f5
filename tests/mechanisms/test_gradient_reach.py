"""Gradient reach: exact against a model that is written out with masks; what it counts, and what it leaves behind."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.full import FullAttention
from moba_train.attention.moba.gate import pool_keys, select_blocks
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.data.batch import Batch, collate
from moba_train.data.loss_mask import mask_prefix
from moba_train.data.samples import Sample
from moba_train.errors import ConfigError
from moba_train.evals.evaluation import EvaluationContext, name_of, with_full
from moba_train.mechanisms.probes.gradient_reach import (
    DISTANCES,
    GradientReach,
    distance_buckets,
    distance_label,
    input_gradient_norms,
)
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import joined_world
from moba_train.resolve.evaluations import exit_data_problems
from tests.evals.setting import built, stage_setting
from tests.resolved import check, stages_of

BLOCK, VOCAB = 8, 64
KINDS = {
    "moba": LayerAttention("moba", MobaAttention.Options(block_size=BLOCK, topk=2)),
    "full": LayerAttention("full", FullAttention.Options()),
}


def make_model(layers: list[str]) -> Transformer:
    """With weights so large that attention is far from uniform."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2, "layers": len(layers)}
    model = Transformer(ModelConfig.model_validate({"vocab_size": VOCAB, **shape}))
    initialize_weights(model, 0)
    for parameter in model.parameters():
        parameter.data *= 4
    model.set_attention(build_attention([KINDS[name] for name in layers], model.config.head_width))
    return model


def make_batch(lengths: list[int], loss_at: list[int]) -> Batch:
    rng = np.random.default_rng(1)
    total = sum(lengths)
    weight = np.isin(np.arange(total), loss_at).astype(np.float32)
    return collate([Sample(rng.integers(VOCAB, size=total), rng.integers(VOCAB, size=total), weight, lengths, [])])


def test_distances_stay_inside_documents_and_end_at_the_last_loss_token() -> None:
    buckets = distance_buckets(make_batch([8, 4, 5], [2, 5, 12 + 4]))
    of_0 = [2, 1, 0, 2, 1, 0, -1, -1]
    assert buckets.tolist() == of_0 + [-1] * 4 + [3, 3, 2, 1, 0]
    assert distance_buckets(make_batch([3], [])).tolist() == [-1] * 3
    far = distance_buckets(make_batch([70], [69]))
    assert [distance_label(bucket) for bucket in far[[69, 68, 67, 66, 65, 64, 61, 60, 0]].tolist()] == [
        *("0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "65-128")
    ]
    assert distance_label(DISTANCES - 1) == "2097153+"


def plain_loss(model: Transformer, x_TD: Tensor, first: int, batch: Batch) -> Tensor:
    """Mean loss of the blocks from `first` on, with attention written out: [T, T] probabilities of each head."""
    lengths = [stop - start for start, stop in pairwise(batch.layout.edges)]
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    cos, sin = rope_cos_sin(batch.positions, model.config.rope, model.config.head_width)
    blocks: list[Any] = list(model.blocks)
    for block in blocks[first:]:
        layer = block.attention
        h_TD = block.attention_norm(x_TD)
        q, k, v = (p(h_TD).unflatten(-1, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k = apply_rope(q, cos=cos, sin=sin), apply_rope(k, cos=cos, sin=sin)
        group = q.shape[1] // k.shape[1]
        seen_HTT = visible(q, k, batch, document, layer.kind)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores_HTT = torch.einsum("thd,shd->hts", q, k) * layer.head_dim**-0.5
        out = torch.einsum("hts,shd->thd", scores_HTT.masked_fill(~seen_HTT, -torch.inf).softmax(-1), v)
        x_TD = x_TD + layer.o_proj(out.flatten(1))
        x_TD = x_TD + block.feed_forward(block.feed_forward_norm(x_TD))
    logits = model.logits(model.norm(x_TD), batch.loss_index)
    return F.cross_entropy(logits, batch.labels[batch.loss_index])


def visible(q: Tensor, k: Tensor, batch: Batch, document: Tensor, kind: Any) -> Tensor:
    """bool [H, T, T]: the keys that each query attends to."""
    place = torch.arange(len(document))
    causal = (document[:, None] == document) & (place[:, None] >= place)
    seen = causal.expand(q.shape[1], -1, -1)
    if kind.name == "full":
        return seen
    options = kind.options
    first = torch.tensor([0] + [-(-(stop - start) // BLOCK) for start, stop in pairwise(batch.layout.edges)]).cumsum(0)
    block = first[document] + batch.positions // BLOCK
    pooled = pool_keys(k, batch.layout, BLOCK)
    selected = select_blocks(
        q, pooled, batch.layout, block_size=BLOCK, history_blocks=options.topk - 1, select="head", always=("current",)
    )
    listed = (selected[..., None] == block).any(2)
    return seen & (listed | (block[:, None] == block))


@pytest.mark.parametrize("layers", [["moba"], ["full"], ["moba", "moba", "full"]])
def test_norms_are_those_of_a_jacobian_of_the_model_written_out(layers: list[str]) -> None:
    """In float64; three documents, one of which has no loss, and one that ends with it."""
    model = make_model(layers).double()
    batch = make_batch([50, 17, 20], [10, 45, 86])
    got = input_gradient_norms(model, batch, batch.loss_weight_sum)
    assert got.dtype == torch.float64
    x_TD = model.embedding(batch.tokens).detach()
    cos, sin = rope_cos_sin(batch.positions, model.config.rope, model.config.head_width)
    for layer, block in enumerate(model.blocks):

        def loss_from_here(x_TD: Tensor, first: int = layer) -> Tensor:
            return plain_loss(model, x_TD, first, batch)

        want = torch.autograd.functional.jacobian(loss_from_here, x_TD).norm(dim=1)
        assert torch.equal(got[layer] == 0, want == 0)
        torch.testing.assert_close(got[layer], want, rtol=1e-5, atol=1e-12)  # the model's logits become float32
        x_TD = block(x_TD, cos, sin, batch.layout)[0].detach()


def test_one_moba_layer_reaches_selected_blocks_and_full_attention_reaches_all() -> None:
    """The tokens of the loss tokens' own blocks, and of those that any of their heads selects."""
    batch = make_batch([16 * BLOCK], [100, 127])
    model = make_model(["moba"])
    context = distance_buckets(batch) > 0
    block: Any = model.blocks[0]
    x_TD = block.attention_norm(model.embedding(batch.tokens))
    layer = block.attention
    cos, sin = rope_cos_sin(batch.positions, model.config.rope, model.config.head_width)
    q, k = (
        apply_rope(project(x_TD).unflatten(-1, (-1, layer.head_dim)), cos=cos, sin=sin)
        for project in (layer.q_proj, layer.k_proj)
    )
    seen = visible(q, k, batch, torch.zeros(len(batch.tokens), dtype=torch.int64), layer.kind)
    reached = seen[:, batch.loss_index].any(0).any(0)
    norms = input_gradient_norms(model, batch, 1.0)[0]
    assert 0 < int((context & ~reached).sum()) < int(context.sum())
    assert torch.equal(norms[context] == 0, ~reached[context])
    model.set_attention(build_attention([KINDS["full"]], model.config.head_width))
    assert (input_gradient_norms(model, batch, 1.0)[0][context] > 0).all()


def write_corpus(prefix: Path, masked: bool) -> None:
    """Documents of which every 40th token carries loss, or all."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(90, 300, size=12)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add_document(rng.integers(VOCAB, size=length))
    if masked:
        with IndexedDatasetWriter(mask_prefix(str(prefix)), np.uint8) as masks:
            for length in lengths:
                masks.add_document(np.arange(length) % 40 == 39)


def load(folder: Path, masked: bool = True, **changes: Any) -> RunConfig:
    write_corpus(folder / "corpus", masked)
    sources = [{"path": str(folder / "corpus")}]
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2}
    recipe: dict[str, Any] = {
        "name": "test",
        "run_dir": str(folder / "run"),
        "model": {"vocab_size": VOCAB, **shape},
        "attention": {"full_layers": "last:1", "moba": {"block_size": BLOCK, "topk": 2}},
        "data": {"train": sources, "validation": sources},
        "batch_tokens": 128,
        "stages": [{"name": "only", "seq_len": 128, "tokens": 256}],
        "evaluation": {"gradient_reach": {"sequences": 3}},
        **changes,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return load_config(folder / "recipe.yaml")


def test_numbers_are_shares_of_the_context_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    config = load(tmp_path)
    (stage,) = stages_of(config)
    with joined_world() as world:
        model = Transformer(config.model).to(world.device)
        initialize_weights(model, 0)
        model.embedding.weight.requires_grad_(False)  # a frozen embedding: the first layer's input needs no gradient
        generator = torch.get_rng_state()
        evaluation = built(GradientReach, config)
        context = EvaluationContext(model, stage, DataShard(), world.device, with_full(stage.attention))
        result = evaluation.run(context)
        norms = []
        for index in range(3):
            batch = collate([evaluation._data.sample(index)])
            rows = distance_buckets(batch) > 0
            norms.append(input_gradient_norms(model, batch.to(world.device), 1.0)[:, rows])
    together = torch.cat(norms, dim=1)
    reach = (together > 1e-3 * together.mean(1, keepdim=True)).double().mean(1)
    assert result.numbers["gradient_reach"] == pytest.approx(reach[0].item())
    assert result.numbers["gradient_reach_last"] == pytest.approx(reach[1].item())
    assert result.numbers["gradient_reach_last_full"] > 0.9
    assert result.data["context_tokens"] == together.shape[1]
    assert sum(result.data["tokens"][1:]) == together.shape[1]
    first = result.data["layers"]["moba"][0]
    assert first["zero_share"] == pytest.approx((together[0] == 0).double().mean().item())
    assert sum(first["mass"]) == pytest.approx(1)
    assert name_of(stage.attention) == "moba"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["embedding.weight"]
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert torch.equal(torch.get_rng_state(), generator)


def test_without_a_mask_there_is_no_context_and_it_says_so(tmp_path: Path) -> None:
    until = {"metric": "gradient_reach", "at_least": 0.5, "max_tokens": 1024}
    stages = [{"name": "only", "seq_len": 128, "tokens": 256, "until": until}]
    schedule = {"optim": {"schedule": {"kind": "constant"}}}
    config = load(tmp_path, masked=False, stages=stages, **schedule)
    assert "no token without loss before one with loss" in built(GradientReach, config).missing
    (problem,) = exit_data_problems(config.evaluation, [stage_setting(config)])
    assert problem.startswith("stages[0].until: data.validation has no token without loss")
    assert "hold out documents with loss masks" in problem


def test_a_recipe_without_validation_data_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": []})})
    with pytest.raises(ConfigError, match=r"evaluation\.gradient_reach: needs sequences to measure on; set data"):
        check(config, 1)
