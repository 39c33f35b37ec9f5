"""Recipes of `moba-train sparsify`: what is shared, the extension, the sparse arm and the arm of full attention.

They are ordinary recipes, in OUTPUT/recipes, that are written once: a recipe that is there is left as it is, so that
one can edit it and run on. Both arms begin with the same weights and train on the same batches in the same order.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from moba_train.config.attention import resolve_layers
from moba_train.config.base import Length, Section, TokenBudget, format_count
from moba_train.config.explain import explain
from moba_train.config.load import Dumper, apply_overrides
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError, UserError
from moba_train.registry import ATTENTION_KINDS
from moba_train.resolve.initial_weights import source_model
from moba_train.tools.convert.hf import imported_recipe
from moba_train.tools.hf.config import is_hf_folder
from moba_train.tools.saved_recipe import open_checkpoint, saved_training

BASE = "base.yaml"
EXTEND = "extend.yaml"
CALIBRATED = "calibrated.yaml"
EVALUATION = "evaluation.yaml"
SPARSE = "sparse.yaml"
FULL = "full.yaml"
EQUAL_SECONDS = "equal-seconds.yaml"

_BATCH = 1 << 17
"""Tokens of a step, as in configs/recipes/smollm2-32k.yaml."""
_FEWEST_STEPS = 64
"""Steps of a run at least, with smaller batches if there are few tokens."""
_EXTENSION_RATE = 5
"""Factor on the learning rate while the model learns the length: its base is new."""
_SCORER_RATE = 10
"""Factor on the learning rate of a scorer. At the model's own, 1e-4, the divergence of SmolLM2-135M's fell by 8 % in 23
steps of full attention, at five times that by 32 % in 38; the model itself got worse at 5e-4
(benchmarks/measured/sparsify.md)."""
_KL_WEIGHT = 0.1
"""Weight of a scorer's divergence. AdamW's steps hardly depend on it, but all gradients are clipped together: with 1
the scorer's norm was 5.4 in SmolLM2-135M, the model's about 0.3, and the model's spikes were not cut
(benchmarks/measured/sparsify.md)."""
_KL_EVERY = 8
"""A scorer learns from every eighth query. The divergence of all took 1.3 times as long as full attention's two passes,
and the gradient of an eighth is closer to that of all than another text's is (benchmarks/measured/sparsify.md)."""
_BUCKETS = 16
"""Parts of a sequence whose losses are measured apart."""
_BASE_POWER = 5 / 3
"""RoPE's base grows by this power of the length: ten times for four times the length, as in smollm2-32k.yaml."""


class Request(Section):
    """Options of `moba-train sparsify` that decide about its result; OUTPUT/request.yaml keeps them."""

    model: str = Field(description="Hugging Face folder, run folder or checkpoint")
    data: list[str] = Field(min_length=1, description="corpora to train on")
    validation: list[str] = Field(min_length=1, description="corpora of held-out text")
    tokenizer: str | None = None
    length: Length
    budget: Length
    tokens: TokenBudget
    kind: str
    block_size: Length | None = None
    full_layers: int | None = Field(None, ge=1)
    seeds: int = Field(1, ge=1, le=100)
    baseline: bool = True
    equal_seconds: bool = False
    lr: float = Field(1e-4, gt=0)
    rope_theta: float | None = Field(None, gt=1)
    gpus: int = Field(1, ge=1)
    overrides: list[str] = []

    @classmethod
    def checked(cls, **options: Any) -> "Request":
        """The request with these options. Raises ConfigError for values that are not allowed."""
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, {key: f"--{key.replace('_', '-')}" for key in options})) from None


@dataclass(frozen=True)
class Source:
    """The model that is made sparse."""

    model: ModelConfig
    length: int
    """Tokens of the longest sequences that it was trained with."""
    attention: dict[str, Any]
    """Section `attention` of a recipe: full attention, and the layers that keep a window."""
    tokenizer: str | None
    stage: int = 0
    """Stage of its recipe in which it is evaluated."""

    @classmethod
    def read(cls, path: Path) -> "Source":
        """The model in a Hugging Face folder, a run folder or a checkpoint. Raises UserError when it is none."""
        if is_hf_folder(path):
            recipe = imported_recipe(path, path)
            length = recipe.stages[0].seq_len
            stage = 0
            layers = resolve_layers(recipe.attention, recipe.model.layers)
        else:
            saved = open_checkpoint(path)
            recipe = saved.config
            length = saved_training(saved.path).seq_len
            stage = saved.stage.index
            layers = saved.stage.attention
        full = [layer.full(keep_windows=True) or layer for layer in layers]
        others = {layer.kind for layer, one in zip(layers, full, strict=True) if one.kind not in ("full", "window")}
        if others:  # both arms would lose what kind full lacks
            found = ", ".join(sorted(others))
            raise UserError(f"{path}: given layers of kind {found}; allowed: full, window, and kinds that select")
        windows = {
            number: {"kind": "window", **layer.options.model_dump(mode="json", exclude_defaults=True)}
            for number, layer in enumerate(layers)
            if layer.kind == "window"
        }
        attention = {"default": "full"} | ({"overrides": windows} if windows else {})
        return cls(source_model(path), length, attention, recipe.data.tokenizer, stage)


def topk_of(request: Request) -> tuple[int, int]:
    """(block size, blocks that a query attends to, its own included) of the budget. Raises UserError for a kind without
    blocks, and a budget of fewer than two."""
    kind = ATTENTION_KINDS.get(request.kind)
    fields = {} if kind is None else kind.Options.model_fields
    if not {"block_size", "topk"} <= fields.keys():
        able = [
            name
            for name, one in ATTENTION_KINDS.usable().items()
            if {"block_size", "topk"} <= {*one.Options.model_fields}
        ]
        raise UserError(f"--kind: given {request.kind}; allowed: {', '.join(able)}")
    size = request.block_size or (64 if request.kind == "moba" else fields["block_size"].default)
    if request.budget % size or request.budget < 2 * size:
        raise UserError(
            f"--budget: given {request.budget}; allowed: a multiple of --block-size {size}, two blocks at least"
        )
    if request.budget >= request.length:
        raise UserError(
            f"--budget: given {request.budget}; allowed: fewer than the {request.length} tokens of --length"
        )
    return size, request.budget // size


def recipes(request: Request, source: Source, output: Path) -> dict[str, str]:
    """Text of every recipe by its file name. Raises UserError for options that do not fit the model."""
    size, topk = topk_of(request)
    rope = _rope(request, source)
    first = str(output / "runs" / "extend") if rope else request.model
    extension = request.tokens // 3 if rope else 0
    rest = request.tokens - extension
    if request.length % _BUCKETS:
        raise UserError(f"--length: given {request.length}; allowed: a multiple of {_BUCKETS}")
    smallest = request.length * request.gpus
    batch = smallest * max(1, min(_BATCH, request.tokens // _FEWEST_STEPS) // smallest)
    # Whole steps of the other stage, so that both arms have as many tokens.
    dense = batch * max(1, rest // 2 // batch) if warms_up(request.kind) else 0
    if rest - dense < batch:
        raise UserError(f"--tokens: given {request.tokens}; allowed: at least {3 * batch} for sequences of this length")
    begin = {"init_from": first} | ({"model": {"rope": rope}} if rope else {})

    def stage(name: str, tokens: int, **keys: Any) -> dict[str, Any]:
        return {"name": name, "seq_len": request.length, "tokens": tokens, **keys}

    own = selects(request.kind, size, topk)
    teacher = "full_and_windows" if "overrides" in source.attention else "full"
    sparse_stages = [stage("sparse", rest - dense, distill={"teacher": teacher, "weight": 0.5})]
    full_stages = [stage("full", rest - dense)]
    learns = {}
    if dense:
        sparse_stages.insert(0, stage("dense", dense, attention=in_full(request.kind)))
        # A stage shuffles the samples of its own part of the corpora: with one stage, the order would be another.
        full_stages.insert(0, stage("dense", dense))
        learns = {"optim": {"lr_factors": scorer_rate(request.kind)}}
    contents = {
        BASE: _base(request, source, output, batch),
        EVALUATION: {"evaluation": _evaluation(request, source, size, topk)},
        EXTEND: {
            "extends": BASE,
            "name": "extend",
            "run_dir": first,
            "init_from": request.model,
            "stages": [stage("extend", extension, rope=rope, lr=_EXTENSION_RATE * request.lr)],
        },
        CALIBRATED: {"attention": {"full_layers": f"last:{full_count(request, source)}"}},
        SPARSE: {
            "extends": [BASE, CALIBRATED],
            "name": "sparse",
            "run_dir": str(output / "runs" / "sparse"),
            **begin,
            "attention": {"default": request.kind, request.kind: own},
            **learns,
            "stages": sparse_stages,
        },
        FULL: {
            "extends": BASE,
            "name": "full",
            "run_dir": str(output / "runs" / "full"),
            **begin,
            "stages": full_stages,
        },
        EQUAL_SECONDS: {"extends": FULL, "name": "equal-seconds", "stages": full_stages},
    }
    contents = yaml.safe_load(_dumped(contents))  # no two parts are one object
    problems = []
    for override in request.overrides:
        key = override.partition("=")[0]
        if key in _SET_HERE:
            problems.append(f"override {override!r}: {_SET_HERE[key]}")
        name = next((name for start, name in _OVERRIDDEN.items() if f"{key}.".startswith(f"{start}.")), BASE)
        problems += apply_overrides(contents[name], [override])
    if problems:
        raise ConfigError(problems)
    if not rope:
        del contents[EXTEND]
    if not request.equal_seconds:
        del contents[EQUAL_SECONDS]
    return {name: f"# {_COMMENTS[name]}\n{_dumped(values)}" for name, values in contents.items()}


_OVERRIDDEN = {"attention": SPARSE, "stages": SPARSE, "optim.lr_factors": SPARSE, "evaluation": EVALUATION}
_SET_HERE = {
    "name": "this command names its runs",
    "run_dir": "runs lie in --output",
    "init_from": "runs begin with MODEL",
    "seed": "runs have the seeds 1 to --seeds",
    "optim.lr": "give --lr",
    "attention.default": "give --kind",
}
"""Keys that every run's own recipe or command sets, so that another value would change nothing."""
_COMMENTS = {
    BASE: "Shared by all runs here: model and data. Made by `moba-train sparsify`; edit it as you like.",
    EVALUATION: "Sections of the evaluations that `moba-train eval` is called with; no recipe of its own.",
    EXTEND: "The model learns the length, with full attention, before the arms part.",
    CALIBRATED: "Layers that stay full. A guess until the calibration has measured.",
    SPARSE: "The sparse arm: with full attention, from which a scorer learns, then with what the scorer selects.",
    FULL: "The comparison: full attention on the same batches, from the same weights.",
    EQUAL_SECONDS: "Full attention for as long as the sparse arm trains: its tokens are set when that has trained.",
}


def warms_up(kind: str) -> bool:
    """True if the kind has a scorer that learns full attention's map before it selects."""
    return "mode" in ATTENTION_KINDS[kind].Options.model_fields


def in_full(kind: str) -> dict[str, Any]:
    """Section `attention` of a stage with full attention, from which the kind's scorer learns, also in by_group."""
    return {kind: {"mode": "warmup"}, "by_group": {"mode": "warmup"}}


def scorer_rate(kind: str) -> dict[str, float]:
    """`optim.lr_factors` of the kind's scorer, also in layers of kind by_group."""
    return {f"*.attention.*{kind}.*": _SCORER_RATE}


def selects(kind: str, size: int, topk: int) -> dict[str, Any]:
    """Options of the kind that selects."""
    options: dict[str, Any] = ideal(size, topk) if kind == "moba" else {"block_size": size, "topk": topk}
    if warms_up(kind):
        options |= {"kl_weight": _KL_WEIGHT, "kl_every": _KL_EVERY}
    if "index_keys" in ATTENTION_KINDS[kind].Options.model_fields:
        options["index_keys"] = "group"
    return options


def ideal(size: int, topk: int) -> dict[str, Any]:
    """Options of the ideal selection, once for a group of heads. Blocks that are selected whatever their scores are
    the first, the previous and the own one, where the budget holds more than these."""
    forced = ["first", "previous", "current"] if topk > 3 else ["current"]
    return {"block_size": size, "topk": topk, "select": "group", "always": forced}


def _dumped(values: Any) -> str:
    return yaml.dump(values, Dumper=Dumper, sort_keys=False)


def arms(request: Request) -> list[str]:
    """Names of the arms, in the order in which they are trained; their recipes have these names."""
    return [*(["full"] if request.baseline else []), "sparse", *(["equal-seconds"] if request.equal_seconds else [])]


def full_count(request: Request, source: Source) -> int:
    """Layers that stay full, of those without a window: three, and no more than a quarter if there are eight or more.
    Raises UserError when none would be sparse."""
    layers = source.model.layers - len(source.attention.get("overrides", {}))
    if layers < 2:
        raise UserError(
            f"{request.model}: given {layers} layers without a window; allowed: two or more, one to stay full"
        )
    count = request.full_layers or max(1, min(3, layers // 4))
    if count >= layers:
        raise UserError(
            f"--full-layers: given {count}; allowed: fewer than the model's {layers} layers without a window"
        )
    return count


def _rope(request: Request, source: Source) -> dict[str, Any]:
    """The rotary embedding for a length that is new to the model; empty for one that is not."""
    if request.length <= source.length and request.rope_theta is None:
        return {}
    rope = source.model.rope
    if rope.kind not in ("none", "abf"):
        option = f"--length: given {request.length}"
        if request.length <= source.length:
            option = f"--rope-theta: given {request.rope_theta}"
        raise UserError(
            f"{option}, and the model was trained on {source.length} tokens with a rotary embedding of kind "
            f"{rope.kind}; allowed: at most these, without --rope-theta, or extend it first (docs/how-to/stages.md)"
        )
    theta = request.rope_theta or float(f"{rope.theta * (request.length / source.length) ** _BASE_POWER:.2g}")
    return {"kind": "abf", "theta": theta}


def _base(request: Request, source: Source, output: Path, batch: int) -> dict[str, Any]:
    tokenizer = request.tokenizer or source.tokenizer
    if tokenizer is None:
        raise UserError(f"{request.model}: no tokenizer lies there, and needles need one; give --tokenizer FILE")
    return {
        "name": "base",
        "run_dir": str(output / "runs" / "base"),
        "seed": 1,
        "model": source.model.model_dump(mode="json", exclude_defaults=True),
        "attention": source.attention,
        "data": {
            "tokenizer": tokenizer,
            "train": [{"path": path} for path in request.data],
            "validation": [{"path": path} for path in request.validation],
        },
        "batch_tokens": batch,
        "optim": {"lr": request.lr, "schedule": {"kind": "cosine", "warmup_tokens": request.tokens // 16}},
        "checkpoint": {"every": 16},
        "evaluation": {"every": 64, "sequences": 8},
    }


def _evaluation(request: Request, source: Source, size: int, topk: int) -> dict[str, Any]:
    """Sections of the evaluations, by name."""
    length = request.length
    own = ideal(size, topk)
    budgets = [own, own | {"select": "head"}]
    asked = {"lengths": sorted({length // 2, length}), "samples": 4}
    few = asked | {"samples": 1, "depths": [10, 50, 90]}  # the ideal selection takes seconds a sequence
    probe = few | {"lengths": [length], "by": "needle", "groups": False}
    if warms_up(request.kind):  # the ideal selection, a slow one, stands for it, with which no layer loses anything
        probe["by"] = "copy"
        stands_for = {"kind": request.kind, "options": selects(request.kind, size, topk)}
        probe |= {"switch": ["sparse"], "stands_for": stands_for}
    bucket = length // _BUCKETS
    return {
        "position_wise": {"bucket": bucket, "sequences": 8},
        "needle": asked,
        "ruler": asked,
        "oracle": {"budgets": budgets, "bucket": bucket, "sequences": 4, "questions": ["needle"], **few},
        "full_layers": {"count": full_count(request, source), "bucket": bucket, "sequences": 2, **probe},
    }


def sections(evaluation: dict[str, Any], names: Sequence[str]) -> list[str]:
    """These sections of evaluation.yaml as words of a command."""
    return [f"evaluation.{name}={json.dumps(evaluation[name])}" for name in names]


def word(key: str, path: Path) -> str:
    """An override that gives a path, in quotes if YAML might read something else."""
    is_plain = re.fullmatch(r"[/.\w-]+", str(path))
    return f"{key}={path if is_plain else json.dumps(str(path))}"


def told(request: Request) -> str:
    """The request in a line."""
    size, topk = topk_of(request)
    return (
        f"{request.model}: {request.kind}, {topk} blocks of {size} keys a query "
        f"({format_count(request.budget, 1024)}), sequences of {format_count(request.length, 1024)}, "
        f"{format_count(request.tokens, 1000)} tokens, {request.seeds} seed{'s' * (request.seeds > 1)}"
    )
