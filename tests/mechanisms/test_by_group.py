"""Groups of heads with different kinds in one layer: what each kind gives on its own, ranks, documents, decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from moba_train.attention.kind import MicroBatch, StageContext
from moba_train.attention.registry import KINDS
from moba_train.tools.inference.cache import CachedAttention, CachePlan
from tests.attention.kind_checks import MODEL, Layer, make_layer, results, run_layer
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors

LENGTHS = [12, 0, 1, 27]
WIDE = MODEL.model_copy(update={"heads": 6, "kv_heads": 3})
BLOCKS = {"block_size": 4, "topk": 3}
SPARSE = {"kind": "moba", "options": BLOCKS}
GATED = {"kind": "msa", "options": BLOCKS}
CONVOLVED = {"kind": "moba", "options": BLOCKS | {"key_conv": 3}}
NEAR = {"kind": "window", "options": {"window": 5, "sinks": 2}}
CASES: dict[str, dict[str, Any]] = {
    "moba and full": {"parts": [SPARSE | {"groups": [1]}]},
    "msa and a window": {"parts": [NEAR | {"groups": [1]}, GATED | {"groups": [0]}]},
    "key convolutions": {"parts": [CONVOLVED | {"groups": [1]}, CONVOLVED | {"kind": "moba_v1", "groups": [0]}]},
    "msa in its warm-up": {"parts": [GATED | {"groups": [0]}], "mode": "warmup"},
}
each = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def apart(layer: Layer) -> list[Tensor]:
    """Each part as a layer of its own."""
    group = layer.q.shape[1] // layer.k.shape[1]
    out = torch.zeros_like(layer.q)
    losses = []
    for part in layer.kind.options.complete(layer.k.shape[1]):
        heads = [head for number in part.groups for head in range(number * group, (number + 1) * group)]
        groups = list(part.groups)
        sizes = {"heads": len(heads), "kv_heads": len(groups)}
        inputs = (layer.x, layer.q[:, heads], layer.k[:, groups], layer.v[:, groups])
        alone = layer.with_inputs(
            inputs,
            kind=KINDS[part.kind](part.options, layer.model.head_width),
            parameters=layer.parameters[part.kind] if part.kind in (layer.parameters or {}) else None,
            model=layer.model.model_copy(update=sizes),
        )
        outputs = run_layer(alone)
        out = out.index_copy(1, torch.tensor(heads), outputs[0])
        losses += outputs[1:]
    return [out, *losses]


@each
def test_each_part_is_its_kind_on_a_smaller_layer(options: dict[str, Any]) -> None:
    layer = make_layer("by_group", options, LENGTHS, model=WIDE)
    torch.testing.assert_close(results(layer), results(layer, apart), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["moba", "msa"])
def test_new_tokens_attend_to_all_keys_if_they_are_to(kind: str) -> None:
    layer = make_layer("by_group", {"parts": [{"kind": kind, "groups": [1], "options": BLOCKS}]}, [27])
    full = layer.with_inputs(layer.inputs(), kind=KINDS["full"](KINDS["full"].Options(), MODEL.head_width))
    plan = CachePlan([27], torch.device("cpu"))
    engine = CachedAttention(plan, "full", layer.kind)
    plan.read(0, 26)
    run_layer(layer.with_inputs((x[:26] for x in layer.inputs()), layout=plan.layout), engine)
    plan.decode([0])
    new = layer.with_inputs((x[26:] for x in layer.inputs()), layout=plan.layout)
    torch.testing.assert_close(run_layer(new, engine)[0], run_layer(full)[0][26:], rtol=0, atol=1e-12)


def grouped(run: Run) -> Run:
    """The gates of one group of heads warm up; then this group selects, and all learns from full attention."""
    part = {"groups": [1], "kind": "msa", "options": {"block_size": 8, "topk": 3}}
    run.recipe["attention"] = {"default": "by_group", "full_layers": "none", "by_group": {"parts": [part]}}
    stage = {"seq_len": 128, "lr": 0.01}
    warm_up = {"tokens": 3 * 512, "attention": {"by_group": {"mode": "warmup"}}, "trainable": ["*.attention.*msa.*"]}
    run.recipe["stages"] = [
        {"name": "warmup", **stage, **warm_up},
        {"name": "sparse", **stage, "tokens": 3 * 512, "distill": {}},
    ]
    run.recipe["checkpoint"] = {"every": 3, "keep_last": 9}
    return run


def test_both_stages_resume_bitwise_and_the_warm_up_trains_the_gates_alone(
    run: Run, tmp_path: Path, corpora: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = grouped(Run(tmp_path / "whole", corpora))
    assert whole.train_here() == 0
    grouped(run)
    for stop in (["--stop-at-step", "1"], ["--stop-at-step", "4"], []):
        assert run.train_here(*stop) == 0
    assert run.losses() == whole.losses()
    assert_same_tensors(run.newest_checkpoint, whole.newest_checkpoint)
    first, last = (checkpoint_tensors(whole.run_dir / "checkpoints" / f"step_{step:08d}") for step in (3, 6))
    fresh = checkpoint_tensors(run.run_dir / "checkpoints" / "step_00000001")
    changed = {name for name in fresh if name.startswith("model.") and not torch.equal(fresh[name], first[name])}
    assert changed
    assert all(".attention.by_group.msa." in name for name in changed)
    assert not torch.equal(first["model.embedding.weight"], last["model.embedding.weight"])


def test_costs_are_those_of_the_parts() -> None:
    kind = KINDS["by_group"](KINDS["by_group"].Options.model_validate(CASES["moba and full"]), MODEL.head_width)
    full, sparse = (
        KINDS[name](KINDS[name].Options(**given), MODEL.head_width) for name, given in (("full", {}), ("moba", BLOCKS))
    )
    assert kind.pairs(MODEL, [64]) == (full.pairs(MODEL, [64]) + sparse.pairs(MODEL, [64])) / 2
    assert kind.flops(MODEL, [64]) == (full.flops(MODEL, [64]) + sparse.flops(MODEL, [64])) / 2
    assert kind.token_bytes(MODEL, MicroBatch(2, 64, 64, 1)).gathered == 2 * 2 * MODEL.kv_heads * MODEL.head_width


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([SPARSE | {"groups": [0]}, SPARSE | {"groups": [1]}], "parts: given kind moba more than once"),
        ([SPARSE | {"groups": [0, 0]}], "parts: given group 0 more than once"),
        ([{"kind": "lightning", "groups": [0]}], "kind: given lightning; allowed: full, .*msa"),
        ([{"kind": "moba_v05", "groups": [0]}], "kind: given moba_v05; allowed: full, moba, .*window"),
        ([{"kind": "moba", "groups": [0], "options": {"topks": 3}}], r"options\.topks: unknown key .*topk"),
        ([{"kind": "moba", "groups": [0], "options": None}], "options: given null; allowed: a section with .*topk"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(parts: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        KINDS["by_group"].Options.model_validate({"parts": parts})


def test_what_cannot_be_is_refused_by_name() -> None:
    def problems(parts: list[dict[str, Any]], tp: int = 1) -> list[str]:
        context = StageContext(MODEL, 64, 1, tp, False, "cpu", "in layer 3")
        return [*KINDS["by_group"].problems(KINDS["by_group"].Options.model_validate({"parts": parts}), context)]

    assert problems([SPARSE | {"groups": [2]}]) == [
        "parts: given group 2 in layer 3; allowed: 0 to 1, the key/value heads"
    ]
    assert problems([SPARSE | {"groups": [1]}], tp=2) == [
        "parts: given in layer 3 with parallel.tp 2; allowed: with tp 1"
    ]
    long = [{"kind": "moba", "groups": [1], "options": {"block_size": 128, "topk": 3}}]
    assert problems(long)[0].startswith("parts (moba): block_size: given 128 in layer 3")
