"""Gate probes: the statistics are those of a plain computation in float64, and the numbers of a known gate."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.facets import SelectedBlocks
from moba_train.attention.layout import TokenRange, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.evals.evaluation import EvaluationContext, name_of
from moba_train.mechanisms.infllm_v2.infllm_v2_kind import InfLLMV2Attention
from moba_train.mechanisms.probes.gate_probe import GateProbe
from moba_train.mechanisms.probes.gate_statistics import GateStatistics, gate_statistics
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import joined_world
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main
from tests.evals.setting import built
from tests.resolved import check, spec_of, stages_of

BLOCK, HEAD_DIM = 8, 16
SCORED = {"margin", "gate_entropy"}
"""Statistics of gates that have a score for each block."""


def moba(topk: int, select: str = "head") -> MobaAttention:
    return MobaAttention(MobaAttention.Options(block_size=BLOCK, topk=topk, select=select), HEAD_DIM)


def tensors(tokens: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, dtype=torch.float64, generator=generator)

    return normal(heads), normal(kv_heads), normal(kv_heads)


def plain(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], topk: int, grouped: bool, sample: list[int]
) -> dict[str, Any]:
    """The means, one query and head at a time."""
    heads_per_kv = q.shape[1] // k.shape[1]
    scale = HEAD_DIM**-0.5
    found: dict[str, list[float]] = {name: [] for name in ("mass_recall", "block_recall", "output_error", "margin")}
    found |= {name: [] for name in ("first_block_share", "mass_entropy")}
    distinct = selections = 0
    for token in sample:
        start = max(edge for edge in itertools.accumulate([0, *lengths]) if edge <= token)
        own = (token - start) // BLOCK
        if own < topk:
            continue
        union: set[tuple[int, int]] = set()
        for head in range(q.shape[1]):
            kv = head // heads_per_kv
            keys = k[start : token + 1, kv]
            logits = keys @ q[token, head] * scale
            p = logits.softmax(0)
            means = k[start : start + own * BLOCK, kv].unflatten(0, (own, BLOCK)).mean(1)
            members = range(kv * heads_per_kv, (kv + 1) * heads_per_kv) if grouped else [head]
            gates = sum(means @ q[token, member] for member in members) * scale
            chosen = set(gates.topk(topk - 1).indices.tolist())
            union |= {(kv, block) for block in chosen}
            mass = p[: own * BLOCK].unflatten(0, (own, BLOCK)).sum(1)
            best = set(mass.topk(topk - 1).indices.tolist())
            kept = torch.tensor([block // BLOCK in chosen or block // BLOCK == own for block in range(len(p))])
            values = v[start : token + 1, kv]
            full = p @ values
            sparse = (p * kept / p[kept].sum()) @ values
            share = mass / mass.sum()
            found["mass_recall"].append(p[kept].sum().item())
            found["block_recall"].append(len(chosen & best) / len(best))
            found["output_error"].append(((sparse - full).norm() / full.norm()).item())
            outside = [gate for block, gate in enumerate(gates.tolist()) if block not in chosen]
            found["margin"].append(min(gates[list(chosen)].tolist()) - max(outside))
            found["first_block_share"].append(float(0 in chosen))
            found["mass_entropy"].append(-(share * share.log()).sum().item() / math.log(own))
            selections += len(chosen)
        distinct += len(union)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return means | {"head_diversity": distinct / selections}


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
def test_the_statistics_are_those_of_a_plain_computation(select: str, heads: int, kv_heads: int) -> None:
    """Three documents: one too short to choose in, one that ends inside a block, one that ends with it."""
    lengths, topk = [20, 77, 64], 3
    q, k, v = tensors(sum(lengths), heads, kv_heads)
    sample = sorted(np.random.default_rng(0).choice(sum(lengths), 60, replace=False).tolist())
    layout = packed_layout(lengths).part(tuple(TokenRange(token, token + 1) for token in sample), None)
    means = gate_statistics(q[sample], k, v, moba(topk, select), layout).means()
    wanted = plain(q, k, v, lengths, topk, select == "group", sample)
    assert len(wanted) >= 6
    for name, value in wanted.items():
        assert means[name] == pytest.approx(value, abs=1e-12), name


def test_what_is_selected_by_no_query_and_by_all() -> None:
    """Keys of block 2 point where all queries point: every query selects it."""
    q, k, v = tensors(80, 1, 1)
    q = torch.ones_like(q)
    k = 1e-3 * k
    k[2 * BLOCK : 3 * BLOCK] += 4.0
    layout = packed_layout([80]).part((TokenRange(72, 80),), None)
    found = gate_statistics(q[72:], k, v, moba(2), layout)
    means = found.means()
    assert means["load_imbalance"] == 9.0
    assert means["never_selected"] == 8 / 9
    assert means["block_recall"] == 1.0
    assert means["mass_recall"] > 0.99
    assert found.distances.nonzero().tolist() == [[0, 3]]  # 9 - 2 = 7 blocks, in the bucket of 5 to 8


def test_where_every_block_is_attended_to_there_is_nothing_to_measure() -> None:
    q, k, v = tensors(24, 2, 2)
    layout = packed_layout([24]).part((TokenRange(0, 24),), None)
    assert gate_statistics(q, k, v, moba(3), layout).means() == {}


def test_an_attention_whose_blocks_have_no_score_has_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(80, 2, 1)
    layout = packed_layout([80]).part((TokenRange(60, 80),), None)
    with_scores = gate_statistics(q[60:], k, v, moba(2), layout).means()
    gate = MobaAttention.gate

    def without_scores(*arguments: Any) -> Any:
        found = gate(*arguments)
        assert found is not None
        return found._replace(scores=None)

    monkeypatch.setattr(MobaAttention, "gate", without_scores)
    without = gate_statistics(q[60:], k, v, moba(2), layout).means()
    assert {"margin", "gate_entropy"} == with_scores.keys() - without.keys()
    assert without == {name: with_scores[name] for name in without}


def test_slots_that_only_queries_without_a_choice_fill_count_for_nothing() -> None:
    """A dense beginning has more slots than a query of the sparse rest fills."""
    q, k, v = tensors(80, 2, 1)
    layout = packed_layout([80]).part((TokenRange(0, 80),), None)
    sizes = {"block_size": BLOCK, "topk": 3, "local_blocks": 1, "window": 4, "stride": 4, "backend": "reference"}
    found = {}
    for dense_len in (1, 40):
        options = InfLLMV2Attention.Options(**sizes, dense_len=dense_len)
        found[dense_len] = gate_statistics(q, k, v, InfLLMV2Attention(options, q.shape[-1]), layout)
    assert found[1].sums["selections"] == 2 * (80 - 3 * BLOCK) * 2
    assert found[40].sums["selections"] == 2 * (80 - 40) * 2
    assert found[40].means()["first_block_share"] == 1.0


def test_sums_of_parts_are_the_sums_of_all() -> None:
    q, k, v = tensors(96, 4, 2)
    whole = packed_layout([96])

    def of(start: int, stop: int) -> GateStatistics:
        return gate_statistics(q[start:stop], k, v, moba(3), whole.part((TokenRange(start, stop),), None))

    together, parts = of(0, 96), of(0, 50) + of(50, 96)
    names = ("mass_recall", "block_recall", "output_error", "margin", "gate_entropy", "head_diversity")
    for name in names:
        assert parts.means()[name] == pytest.approx(together.means()[name], abs=1e-12)
    assert torch.equal(parts.distances, together.distances)


@pytest.mark.parametrize("select", ["head", "group"])
def test_blocks_that_a_kind_gives_are_measured_as_those_that_an_attention_selects(select: str) -> None:
    q, k, v = tensors(96, 4, 2)
    layout = packed_layout([96]).part((TokenRange(30, 96),), None)
    attention = moba(3, select)
    wanted = gate_statistics(q[30:], k, v, attention, layout)
    ids = attention.select_blocks(q[30:], attention.summarize(k, packed_layout([96])), layout)
    selected = SelectedBlocks(ids, BLOCK)
    given = GivenBlocks(BLOCK, 2, HEAD_DIM, "reference", "backend")
    found = gate_statistics(q[30:], k, v, given, layout, selected)
    assert found.means() == {name: value for name, value in wanted.means().items() if name not in SCORED}
    assert torch.equal(found.distances, wanted.distances)


def test_a_gate_may_select_fewer_blocks() -> None:
    """One block where there might be two: half of the best two are found, or none."""
    q, k, v = tensors(80, 1, 1)
    k[2 * BLOCK : 3 * BLOCK] = q[72]  # nearly all of the last queries' attention goes there
    layout = packed_layout([80]).part((TokenRange(72, 80),), None)
    q[72:] = q[72]
    given = GivenBlocks(BLOCK, 2, HEAD_DIM, "reference", "backend")
    for block, recall in ((2, 0.5), (-1, 0.0)):
        selected = SelectedBlocks(torch.tensor([block, -1], dtype=torch.int32).expand(1, 8, 2), BLOCK)
        found = gate_statistics(q[72:], k, v, given, layout, selected)
        means = found.means()
        assert means["block_recall"] == recall
        assert (means["mass_recall"] > 0.5) == (block == 2)
        assert found.distances.sum() == (8 if block == 2 else 0)
        assert all(math.isfinite(value) for value in means.values())


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(8):
            writer.add_document(np.random.default_rng(1).integers(64, size=300))
    recipe = {
        "name": "test",
        "run_dir": str(tmp_path / "run"),
        "model": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "layers": 3, "heads": 4, "kv_heads": 2},
        "attention": {"full_layers": "last:1", "moba": {"block_size": 8, "topk": 2}},
        "data": {"train": [{"path": str(tmp_path / "corpus")}], "validation": [{"path": str(tmp_path / "corpus")}]},
        "batch_tokens": 128,
        "stages": [{"name": "only", "seq_len": 128, "tokens": 256}],
        "evaluation": {"sequences": 2, "gate_probe": {"queries": 40, "sequences": 3}},
        "telemetry": {"report": False, "wandb": {"mode": "disabled"}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_config(path)


def test_it_probes_the_sparse_layers_and_leaves_the_model_as_it_was(config: RunConfig) -> None:
    (stage,) = stages_of(config)
    with joined_world() as world:
        model = Transformer(config.model).to(world.device)
        initialize_weights(model, 0)
        model.set_attention(build_attention(stage.attention, config.model.head_width))
        blocks: list[Any] = list(model.blocks)
        engines = [block.attention.engine for block in blocks]
        own = {name_of(stage.attention): stage.attention}
        context = EvaluationContext(model, stage, DataShard(), world.device, own)
        result = built(GateProbe, config).run(context)
    assert [layer["layer"] for layer in result.data["layers"]] == [0, 1]
    assert result.data["queries"] == 120
    assert 0 < result.numbers["mass_recall"] < 1
    assert sum(result.data["layers"][0]["distance_share"]) == pytest.approx(1)
    assert [block.attention.engine for block in blocks] == engines


def test_training_is_bitwise_what_it_is_without(config: RunConfig, tmp_path: Path) -> None:
    def losses(name: str, *overrides: str) -> list[float]:
        arguments = [str(tmp_path / "recipe.yaml"), f"run_dir={tmp_path / name}"]
        assert main([*arguments, "stages.0.tokens=512", "evaluation.every=1", *overrides]) == 0
        records = read_records(tmp_path / name / "metrics.jsonl")
        probed = [record for record in records if record["type"] == "gate_probe"]
        assert len(probed) == (0 if overrides else 4)
        return [record["loss"] for record in records if record["type"] == "metrics"]

    assert losses("with") == losses("without", "evaluation.gate_probe=null")


def test_problems_are_named(config: RunConfig) -> None:
    wrong = config.model_copy(update={"data": config.data.model_copy(update={"validation": []})})
    with pytest.raises(ConfigError) as error:
        check(wrong, 1)
    assert "evaluation.gate_probe: needs sequences" in str(error.value)


def test_layers_whose_selection_is_not_seen_count_as_nothing_measured(config: RunConfig) -> None:
    """Not as if they attended to everything, which layers do that are shorter than what they may select."""
    for attention, expected in (({"default": "lightning"}, math.nan), ({"moba": {"block_size": 64}}, 1.0)):
        given = config.model_dump(mode="json", exclude_unset=True) | {
            "attention": {"full_layers": "last:1"} | attention
        }
        changed = RunConfig.model_validate(given)
        (stage,) = stages_of(changed)
        with joined_world() as world:
            model = build_model(spec_of(changed))
            initialize_weights(model, 0)
            own = {name_of(stage.attention): stage.attention}
            result = built(GateProbe, changed).run(EvaluationContext(model, stage, DataShard(), world.device, own))
        assert result.numbers["mass_recall"] == pytest.approx(expected, nan_ok=True), attention
        assert ("nothing is measured" in result.message) == math.isnan(expected)
        assert result.table == [result.message], "no head of a table without rows"


def test_a_stage_of_full_attention_says_how_another_one_is_probed(config: RunConfig) -> None:
    changed = config.model_copy(update={"attention": config.attention.model_copy(update={"default": "full"})})
    assert "such as stages.0.attention.default=moba" in built(GateProbe, changed).missing
