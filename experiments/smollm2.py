"""Parts that F13 and F15 share: published weights of SmolLM2-135M, its corpus, evaluations, and how they are read."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.corpus import Corpus
from experiments.figure import Result
from experiments.models import QUICK_SIZES, moba
from moba_train.errors import UserError

BATCH_TOKENS = 131_072
WEIGHTS = "weights"
"""Folder of the corpus' with SmolLM2-135M in Hugging Face's format."""
OTHER = "other"
"""Corpus of a held-out domain that is not trained on."""
ANSWERS = "answers"
"""Name of the evaluation of the last checkpoint."""
THETA = 4.0e6
"""RoPE's base in all arms; the published weights have 1e5."""
SCORED = 2_097_152
"""Tokens of the loss by position at the end; of needles and RULER about as many. Longer sequences are fewer."""
LR = 1e-4
"""Peak rate of the arms, whose weights are published ones: at 5e-4 full attention lost 0.14 nats in four steps
(benchmarks/measured/sparsify.md), which an arm with more tokens makes up for better."""
BASE_LR = 3e-4
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "layers": 30,
    "heads": 9,
    "kv_heads": 3,
    "rope": {"theta": 100_000.0},
    "norm_eps": 1.0e-5,
    "tie_embeddings": True,
}
FULL_ATTENTION: dict[str, Any] = {"default": "full"}
SPARSE: dict[str, dict[str, Any]] = {
    "moba": {**moba(128, 16), "full_layers": "last:3"},
    "window": {"default": "window", "window": {"window": 2048, "sinks": 64}, "full_layers": "last:3"},
}
QUICK_SPARSE: dict[str, dict[str, Any]] = {
    "moba": {**moba(64, 3), "full_layers": "last:1"},
    "window": {"default": "window", "window": {"window": 128, "sinks": 4}, "full_layers": "last:1"},
}
QUICK_LENGTH = 1024


def batch_tokens(quick: bool) -> int:
    """Tokens of a step."""
    return 2 * QUICK_LENGTH if quick else BATCH_TOKENS


def recipe(
    attention: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    lr: float,
    quick: bool,
    evaluation: Mapping[str, Any],
) -> dict[str, Any]:
    """SmolLM2-135M in documents of at least the last stage's length; one warm-up and cosine over all stages."""
    source = {"path": "train"} if quick else {"path": "train", "min_length": stages[-1]["seq_len"]}
    tokens = sum(stage["tokens"] for stage in stages)
    model = {**QUICK_SIZES["small"], "tie_embeddings": True} if quick else dict(SMOLLM2)
    return {
        "model": model | ({} if "rope" in stages[0] else {"rope": {"theta": THETA}}),
        "attention": dict(attention),
        "data": {"train": [source]},
        "batch_tokens": batch_tokens(quick),
        "stages": list(stages),
        "optim": {"lr": lr, "schedule": {"kind": "cosine", "warmup_tokens": tokens // 10}},
        "evaluation": dict(evaluation),
    }


def from_weights(content: dict[str, Any], quick: bool) -> dict[str, Any]:
    """The recipe of a base: from the published weights, and with the same result wherever it is trained again."""
    return content | {"deterministic": True} | ({} if quick else {"init_from": WEIGHTS})


def need_weights(corpus: Corpus) -> None:
    """Raises UserError where the corpus' folder lacks the published weights."""
    if not (corpus.folder / WEIGHTS / "config.json").is_file():
        raise UserError(f"{corpus.folder / WEIGHTS}: no weights; experiments/README.md says how they get there")


def by_position(sequences: int, quick: bool) -> dict[str, int]:
    """Options of the loss by position, whose last bucket is the trailing loss."""
    return {"bucket": 256, "sequences": 2} if quick else {"bucket": 2048, "sequences": sequences}


def needles(lengths: Sequence[int], samples: int, quick: bool) -> dict[str, Any]:
    """Options of needles at nine depths of each length, none of which lies in the query's own block."""
    if quick:
        return {"lengths": [QUICK_LENGTH], "depths": [0, 50], "samples": 1, "answer": "full"}
    return {"lengths": list(lengths), "depths": list(range(0, 99, 11)), "samples": samples, "answer": "full"}


def asked(attention: str, evaluations: Mapping[str, Mapping[str, Any]], *more: str) -> list[str]:
    """Arguments of `moba-train eval` for evaluations with these options."""
    options = [f"evaluation.{name}={json.dumps(one)}" for name, one in evaluations.items()]
    return ["--attention", attention, "--tasks", ",".join(evaluations), *more, *options]


def attention_of(names: Sequence[str], mode: str) -> str | None:
    """The name, among those of an evaluation, of `full`, the arm's `own` attention, or that with full `answers`."""
    own = next((name for name in names if name != "full" and "," not in name), None)
    found = {"full": "full", "own": own, "answers": next((name for name in names if "," in name), None)}[mode]
    return found if found in names else None


def trailing(result: Result, mode: str) -> float:
    """Loss of the last 2K tokens run with full attention or the arm's own; NaN for an arm that has no other."""
    curves = result["evaluations"][ANSWERS]["position_wise"]["curves"]
    name = attention_of(list(curves), mode)
    return math.nan if name is None else float(curves[name]["mean"][-1])


def needles_found(result: Result, mode: str) -> float:
    """Share of needles, over lengths and depths."""
    maps = result["evaluations"][ANSWERS]["needle"]["maps"]
    name = attention_of(list(maps), mode)
    return math.nan if name is None else float(maps[name]["score"])


def mean(results: Sequence[Result], value: Callable[[Result], float]) -> str:
    """Mean over the results that have a value, as a cell of a table."""
    known = [found for result in results if math.isfinite(found := value(result))]
    return f"{statistics.mean(known):.4f}" if known else "–"
