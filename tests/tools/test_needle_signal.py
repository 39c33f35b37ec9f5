"""The signal-to-noise model holds where its assumptions do, and the evaluation measures what the gate does."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import pictures
from benchmarks.needle_signal import main as program
from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.evals.evaluation import EvaluationContext
from moba_train.model.build import build_model, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World
from moba_train.tools.needle.needle import Needle
from moba_train.tools.needle.needle_signal import (
    SUMS,
    GateSize,
    NeedleSignalEvaluation,
    head_means,
    miss_rate,
    needle_signal,
    outranked_rate,
    rates,
)
from tests.evals.setting import built
from tests.resolved import check, spec_of
from tests.tools.questions import VOCAB, context, recipe

LENGTH = 448
WIDTH, BLOCKS, HEADS, DRAWS = 64, 15, 16, 60


def head_of(size: GateSize, separation: float, cluster: int = 1, common: float = 0.0) -> dict[str, float]:
    """What is found in random keys of variance 1 / WIDTH: `cluster` keys of one block whose product with the query has
    the mean `separation`, and in each block a random part that all its keys have in common, of variance `common`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(WIDTH)

    total = torch.zeros(len(SUMS), HEADS, dtype=torch.float64)
    for draw in range(DRAWS):
        q_HD = torch.nn.functional.normalize(normal(HEADS, WIDTH), dim=-1)
        k_NBHD = normal(BLOCKS, size.block_size, HEADS, WIDTH)
        if common:
            k_NBHD += math.sqrt(common) * normal(BLOCKS, 1, HEADS, WIDTH)
        block = draw % BLOCKS
        k_NBHD[block, :cluster] += separation * q_HD
        k_SHD = torch.cat([k_NBHD.flatten(0, 1), normal(1, HEADS, WIDTH)])
        place = torch.tensor([len(k_SHD) - 1])
        total += needle_signal(q_HD[None], k_SHD, place, torch.tensor([block * size.block_size]), size, WIDTH**-0.5)
    assert total[0].tolist() == [DRAWS] * HEADS
    (head,) = head_means(total.sum(1, keepdim=True))
    return head


@pytest.mark.parametrize(("block_size", "separation"), [(16, 0.8), (32, 0.8), (16, 0.4)])
def test_on_independent_normal_keys_the_papers_prediction_holds(block_size: int, separation: float) -> None:
    """960 needles: rates are known to about 0.015."""
    size = GateSize(block_size=block_size, topk=4)
    head = head_of(size, separation)
    assert head["separation"] == pytest.approx(separation, abs=0.02)
    assert head["key_variance"] == pytest.approx(1 / WIDTH, rel=0.02)
    found = rates(head, size, WIDTH)
    expected = 0.5 * math.erfc(separation * math.sqrt(WIDTH / (2 * block_size)) / math.sqrt(2))
    assert found["outranked_paper"] == pytest.approx(expected, abs=0.01)
    for model in ("paper", "spread", "cluster", "scores"):
        assert found["outranked"] == pytest.approx(found[f"outranked_{model}"], abs=0.03), model
        assert found["missed"] == pytest.approx(found[f"missed_{model}"], abs=0.045), model
    assert 0.05 < found["missed"] < 0.7


def test_each_prediction_holds_where_its_own_assumptions_do() -> None:
    """Four keys for the needle: those that count one key predict far too many misses. Keys of a block that have a part
    in common: only the prediction that knows the spread of scores is right."""
    size = GateSize(block_size=16, topk=4)
    several = rates(head_of(size, 0.4, cluster=4), size, WIDTH)
    assert several["missed_paper"] > several["missed"] + 0.3 < several["missed_spread"]
    assert several["missed"] == pytest.approx(several["missed_cluster"], abs=0.03)
    alike = rates(head_of(size, 0.8, common=0.5), size, WIDTH)
    assert all(alike["missed"] > alike[f"missed_{model}"] + 0.1 for model in ("paper", "spread", "cluster"))
    assert alike["missed"] == pytest.approx(alike["missed_scores"], abs=0.05)


def test_a_gate_misses_as_often_as_the_binomial_distribution_says() -> None:
    assert miss_rate(1.3, 0.7, others=1, slots=1) == pytest.approx(outranked_rate(1.3, 0.7), abs=1e-9)
    # Scores that are all alike: any of the 10 blocks may be among the 3 best.
    assert miss_rate(0.0, 1.0, others=9, slots=3) == pytest.approx(0.7, abs=1e-9)
    # A needle whose score is fixed: the binomial tail itself.
    p = outranked_rate(1.0, 0.0)
    tail = 1 - sum(math.comb(5, count) * p**count * (1 - p) ** (5 - count) for count in range(2))
    assert miss_rate(1.0, 0.0, others=5, slots=2) == pytest.approx(tail, abs=1e-12)
    assert miss_rate(-9.0, 1.0, others=4, slots=4) == pytest.approx(1.0, abs=1e-6)
    assert miss_rate(0.0, 1.0, others=3, slots=4) == 0.0
    assert miss_rate(40.0, 1.0, others=100, slots=1) == pytest.approx(0.0, abs=1e-12)


def test_equal_scores_count_half_and_the_lower_block_is_selected() -> None:
    """Five blocks, two of which are selected: the needle's is missed where two others come before it."""
    size = GateSize(block_size=4, topk=3)
    q, k = torch.ones(2, 2, 8, dtype=torch.float64), torch.ones(21, 1, 8, dtype=torch.float64)
    for source, missed in ((5, False), (9, True)):
        heads = head_means(needle_signal(q[:1], k, torch.tensor([20]), torch.tensor([source]), size, 8**-0.5))
        assert [(head["outranked"], head["missed"]) for head in heads] == [(0.5, missed)] * 2


def test_the_sums_are_those_of_a_plain_computation() -> None:
    """Two query heads on one key head; the third query's needle lies in its own block, the fourth has no choice."""
    size = GateSize(block_size=4, topk=3)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(20, heads, 8, dtype=torch.float64, generator=generator) for heads in (2, 1))
    tokens, sources = torch.tensor([18, 15, 13, 6]), torch.tensor([5, 2, 12, 1])
    found = dict(zip(SUMS, needle_signal(q[tokens], k, tokens, sources, size, 8**-0.5), strict=True))
    assert found["queries"].tolist() == [2, 2]
    for head in range(2):
        wanted: dict[str, float] = dict.fromkeys(("separation", "score", "outranked", "missed", "mass"), 0.0)
        for token, source in ((18, 5), (15, 2)):
            blocks = token // 4
            products = k[: token + 1, 0] @ q[token, head]
            wanted["mass"] += (products * 8**-0.5).softmax(0)[source].item()
            products = (
                products[: blocks * 4] / q[token, head].norm() / k[: blocks * 4, 0].square().sum(-1).mean().sqrt()
            )
            scores = products.view(blocks, 4).mean(1)
            others = [block for block in range(blocks) if block != source // 4]
            mean = scores[others].mean()
            wanted["separation"] += (products[source] - mean).item()
            wanted["score"] += (scores[source // 4] - mean).item()
            higher = sum(scores[block] > scores[source // 4] for block in others)
            wanted["outranked"] += float(higher) / len(others)
            wanted["missed"] += float(higher >= 2)
        for name, value in wanted.items():
            assert found[name][head].item() == pytest.approx(value, abs=1e-12), name


def test_misses_are_those_of_the_blocks_that_the_layers_select(
    texts: Path, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' own gate is the gate that is looked at, so that needle and needle_signal must agree."""
    hidden: dict[str, Any] = {"depths": [0, 50], "samples": 2, "lengths": [LENGTH]}
    signal = hidden | {"gates": [{"block_size": 16, "topk": 3}, {"block_size": 32, "topk": 5}]}
    config = recipe(texts, LENGTH, {"needle": hidden, "needle_signal": signal})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    engines = [block.get_submodule("attention").engine for block in model.blocks]
    result = built(NeedleSignalEvaluation, config).run(context(config, model))
    assert [block.get_submodule("attention").engine for block in model.blocks] == engines
    selected = built(Needle, config).run(context(config, model)).data["maps"]["moba"]["selected"][0]
    rows = result.data["rows"]["moba"][str(LENGTH)]
    assert len(rows) == 3 * 4 * 2, "layers, heads, gates"
    for layer in (0, 1):
        missed = [row["missed"] for row in rows if (row["layer"], row["block_size"]) == (layer, 16)]
        assert 1 - sum(missed) / len(missed) == pytest.approx(selected[layer], abs=1e-6)
    assert 0 < result.numbers["needle_missed"] < 1
    assert result.numbers["needle_missed_predicted"] == pytest.approx(result.numbers["needle_missed"], abs=0.3)
    assert any("16/3" in line for line in result.table)

    # The program of benchmarks/ makes a table and a picture of it.
    (tmp_path / "evaluation.json").write_text(json.dumps({"needle_signal": result.data}))
    output, plot = tmp_path / "signal.json", tmp_path / "signal.svg"
    command = ["needle_signal", str(tmp_path / "evaluation.json"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    program()
    lines = json.loads(output.read_text())["results"]["summary"]
    assert [(line["block_size"], line["heads"]) for line in lines if line["which"] == "all"] == [(16, 12), (32, 12)]
    pictures.draw("smollm2-signal", [output], plot)
    assert "observed" in plot.read_text()


def next_to_full(config: RunConfig, model: Transformer) -> EvaluationContext:
    """The layers' own kind, and kind `full` in all of them, though NSA's weights are another model with it."""
    found = context(config, model)
    full = LayerAttention("full", FullAttention.Options())
    return replace(found, attentions={**found.attentions, "full": (full,) * config.model.layers})


@pytest.mark.parametrize("kind", ["nsa", "lightning"])
def test_layers_that_give_their_blocks_are_looked_at_and_without_any_there_is_no_number(
    kind: str, texts: Path, alone: World
) -> None:
    section = {"depths": [50], "samples": 1, "lengths": [LENGTH], "gates": [{"block_size": 16, "topk": 3}]}
    nsa = {"compressed_block": 8, "stride": 8, "block_size": 16, "topk": 4, "window": 16, "backend": "reference"}
    config = recipe(texts, LENGTH, {"needle_signal": section}, attention={"default": kind, "nsa": nsa})
    model = build_model(spec_of(config))
    initialize_weights(model, 0)
    if kind == "lightning":
        result = built(NeedleSignalEvaluation, config).run(context(config, model))
        assert result.data["rows"] == {kind: {str(LENGTH): []}}, "no linear layer has full attention in its place"
        assert math.isnan(result.numbers["needle_missed"])
        assert result.message.startswith("no query was measured")
    else:
        result = built(NeedleSignalEvaluation, config).run(next_to_full(config, model))
        own, full = (result.data["rows"][name][str(LENGTH)] for name in (kind, "full"))
        assert len(full) == 3 * 4
        assert [(row["layer"], row["head"]) for row in own] == [(row["layer"], row["head"]) for row in full]
        # The first layer has the same queries and keys whatever it attends to.
        assert own[:4] == full[:4]


def test_parts_of_a_layers_heads_are_not_looked_at(texts: Path, alone: World) -> None:
    section = {"lengths": [LENGTH], "depths": [0], "samples": 1, "gates": [{"block_size": 16, "topk": 3}]}
    part = {"groups": [1], "kind": "msa", "options": {"block_size": 16, "topk": 3}}
    attention = {"default": "by_group", "by_group": {"parts": [part]}}
    config = recipe(texts, LENGTH, {"needle_signal": section}, attention=attention)
    model = build_model(spec_of(config))
    initialize_weights(model, 0)
    rows = built(NeedleSignalEvaluation, config).run(context(config, model)).data["rows"]
    assert [len(rows[name][str(LENGTH)]) for name in ("by_group", "full")] == [0, 3 * 4]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nsa", "seer", "msa"])
def test_layers_that_give_their_blocks_are_looked_at_on_a_gpu(kind: str, texts: Path, alone: World) -> None:
    """In bf16, with heads of 64 and the kernels of real training."""
    section = {"depths": [50], "samples": 1, "lengths": [LENGTH], "gates": [{"block_size": 16, "topk": 3}]}
    model_section = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "layers": 2, "heads": 4}
    config = recipe(
        texts,
        LENGTH,
        {"needle_signal": section},
        model=model_section | {"kv_heads": 2, "init_std": 0.1},
        attention={"default": kind, kind: {"block_size": 64, "topk": 4}},
    )
    model = build_model(spec_of(config))
    initialize_weights(model, 0)
    result = built(NeedleSignalEvaluation, config).run(next_to_full(config, model.to("cuda", torch.bfloat16)))
    own, full = (result.data["rows"][name][str(LENGTH)] for name in (kind, "full"))
    assert [(row["layer"], row["head"]) for row in own] == [(row["layer"], row["head"]) for row in full]
    assert len(own) == 2 * 4
    # The first layer has the same queries and keys whatever it attends to.
    assert own[:4] == full[:4]


def test_recipes_and_lengths_that_cannot_work_are_refused_by_key(texts: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check(recipe(texts, LENGTH, {"needle_signal": {}}, parallel={"tp": 2}))
    assert "evaluation.needle_signal: given with parallel.tp 2" in str(error.value)
    config = recipe(texts, LENGTH, {"needle_signal": {}})
    missing = built(NeedleSignalEvaluation, config).missing
    assert "evaluation.needle_signal.lengths: none is at most the stage's seq_len 448 and above 2048" in missing
