"""F17: OLMo 3's long stage in miniature, from 8K to 64K tokens: MoBA in its full layers, and two choices around it.

Three of four layers have a window of 4,096 tokens, the fourth is full (or MoBA), and YaRN stretches the rotary
embedding of the latter alone, as OLMo 3 does. The short stage reads short documents and some long ones, the long stage
as many tokens of each.

    full         the long stage with full attention in every fourth layer, from the weights of `base`
    moba         with MoBA 128/16 in these layers
    kept         as `full`, in one run with the short stage, so that AdamW's state and the place in the text carry over
    masks-late   as `full`, from a base that attended across documents
    masks-never  the same, and the long stage attends across documents as well
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, FULL, GREEN, INK, MOBA, PURPLE, band, powers_of_two, spread
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.corpus import Corpus, write_joined, write_short
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import QUICK_SIZES, SIZES, learning_rate
from experiments.readings import (
    Losses,
    bucket_middles,
    keys_text,
    loss_by_position,
    trailing_by_sequence,
    trailing_documents,
    trailing_loss,
)

SHORT = "short-2k"
JOINED = "joined-2k"
SHORT_VALID = "short-2k-valid"
"""Corpora: training text in documents of at most 2K tokens; these in random order without edges, which is what a model
sees that attends across documents; validation text in short documents."""
AT_SHORT_LENGTH = "short"
"""Name of the evaluation of short documents."""
MASKED_BASE, JOINED_BASE = "base", "base-joined"
LONG_SHARE = {"short": 0.2, "long": 0.5}
"""Share of a stage's tokens that comes from whole documents."""


class Sizes(NamedTuple):
    """Tokens of sequences, batches, stages and documents, and the model."""

    short_length: int
    long_length: int
    short_batch: int
    long_batch: int
    short_tokens: int
    long_tokens: int
    document: int
    window: int
    moba: tuple[int, int]
    """Block size and topk."""
    bucket: int
    sequences: int
    size: str
    shape: Mapping[str, int]
    layers: int


WHOLE = Sizes(
    8192, 65_536, 32_768, 131_072, 60_000_000, 33_554_432, 2048, 4096, (128, 16), 2048, 48, "10m", SIZES["10m"], 8
)
QUICK = Sizes(256, 1024, 512, 2048, 2048, 4096, 64, 128, (32, 3), 256, 2, "small", QUICK_SIZES["small"], 4)


class Setting(NamedTuple):
    """An arm that has a long stage."""

    label: str
    colour: str
    parent: str | None
    """The arm whose weights it begins with; None: it trains the short stage itself."""
    is_moba: bool = False
    joined: bool = False
    """True if the long stage attends across documents."""


SETTINGS: dict[str, Setting] = {
    "full": Setting("full layers", FULL, MASKED_BASE),
    "moba": Setting("MoBA in the full layers", MOBA, MASKED_BASE, is_moba=True),
    "kept": Setting("optimizer's state kept", BLUE, None),
    "masks-late": Setting("document masks in the long stage alone", GREEN, JOINED_BASE),
    "masks-never": Setting("no document masks", PURPLE, JOINED_BASE, joined=True),
}


class LongStage(Figure):
    """OLMo 3's long stage in miniature: MoBA in its full layers, the optimizer's state, document masks."""

    name = "long-stage"
    title = "F17. OLMo 3's long stage in miniature"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)
    height: ClassVar[float] = 3.2

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Each base before the arms that begin with its weights."""
        sizes = QUICK if quick else WHOLE
        bases = [Arm(name, seed, _base(name == JOINED_BASE, sizes)) for name in (MASKED_BASE, JOINED_BASE)]
        asked = ["--seq-len", str(sizes.short_length), "--attention", "own", "--tasks", "validation_loss"]
        evaluations = {AT_SHORT_LENGTH: ["--data", SHORT_VALID, *asked]}
        long = [
            Arm(name, seed, _long(setting, sizes), evaluations, parent=setting.parent)
            for name, setting in SETTINGS.items()
        ]
        return [bases[0], *long[:3], bases[1], *long[3:]]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """The text in short documents, and these joined."""
        sizes = QUICK if quick else WHOLE
        write_short(corpus, "train", folder / SHORT, sizes.document, ends=True)
        write_short(corpus, "valid", folder / SHORT_VALID, sizes.document, ends=True)
        write_joined(folder / SHORT, folder / JOINED, sizes.long_length)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses of each arm at the end of the long stage, and their distance from `full`."""
        rows = [["arm", "mean keys", "loss of the last 2K", *ABOVE, "short documents", *ABOVE, "seeds"]]
        long = [result for result in results if AT_SHORT_LENGTH in result["evaluations"]]
        for name in SETTINGS:
            own = [result for result in long if result["name"] == name]
            if own:
                row = [name, keys_text(own[0])]
                for value, cells in ((trailing_loss, _trailing(long)), (short_loss, _short(long))):
                    row += [f"{statistics.mean(map(value, own)):.4f}", *above(cells, name, "full")]
                rows.append([*row, str(len(own))])
        return Finding(_verdicts(long), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Left: loss by position. Right: how far the loss of the last 2K is above that of `full`; bands over seeds."""
        left, right = canvas.subplots(1, 2, width_ratios=(3, 2))
        full = {result["seed"]: trailing_loss(result) for result in results if result["name"] == "full"}
        shown = [name for name in SETTINGS if any(result["name"] == name for result in results)]
        for place, name in enumerate(shown):
            setting = SETTINGS[name]
            own = [result for result in results if result["name"] == name]
            middles = bucket_middles(own[0])
            band(left, middles, list(map(loss_by_position, own)), setting.colour, setting.label)
            gaps = [trailing_loss(one) - full[one["seed"]] for one in own if one["seed"] in full]
            if gaps and name != "full":
                spread(right, gaps, place, setting.colour)
            powers_of_two(left, [int(middles[0] * 2) << step for step in range(0, len(middles).bit_length(), 2)])
        right.axvline(0, color=INK, lw=0.8)
        right.set_yticks(range(len(shown)), shown)
        right.invert_yaxis()
        left.set_xlabel("position in the context, tokens")
        left.set_ylabel("loss, nats")
        right.set_xlabel("loss of the last 2K above full, nats")
        canvas.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)


def _stage(name: str, joined: bool, sizes: Sizes) -> dict[str, Any]:
    """The stage `short` or `long`, with a schedule that spans it alone, as if it were a run."""
    is_long = name == "long"
    tokens = sizes.long_tokens if is_long else sizes.short_tokens
    whole: dict[str, Any] = {"path": "train", "weight": LONG_SHARE[name]}
    if is_long:
        whole["min_length"] = sizes.long_length
    stage = {
        "name": name,
        "seq_len": sizes.long_length if is_long else sizes.short_length,
        "tokens": tokens,
        "batch_tokens": sizes.long_batch if is_long else sizes.short_batch,
        "train": [whole, {"path": JOINED if joined else SHORT, "weight": 1 - LONG_SHARE[name]}],
        "lr": learning_rate(sizes.size) * (0.3 if is_long else 1.0),
        "schedule": {"kind": "cosine", "warmup_tokens": tokens // 20},
        "evaluate": is_long,
    }
    if is_long:
        factor = sizes.long_length // sizes.short_length
        yarn = {"kind": "yarn", "factor": factor, "original_seq_len": sizes.short_length}
        stage["rope"] = {"overrides": {"every:4": yarn}}
    return stage


def _base(joined: bool, sizes: Sizes) -> dict[str, Any]:
    return _recipe([_stage("short", joined, sizes)], sizes)


def _long(setting: Setting, sizes: Sizes) -> dict[str, Any]:
    stages = [_stage("long", setting.joined, sizes)]
    if setting.parent is None:
        stages.insert(0, _stage("short", setting.joined, sizes))
    content = _recipe(stages, sizes)
    content["evaluation"] = {
        "every": 10**6,
        "sequences": sizes.sequences,
        "position_wise": {"bucket": sizes.bucket, "sequences": sizes.sequences, "attention": "own"},
    }
    if setting.is_moba:
        block_size, topk = sizes.moba
        gates = {"kind": "moba", "block_size": block_size, "topk": topk}
        content["attention"] |= {"full_layers": "none", "overrides": {"every:4": gates}}
    return content


def _recipe(stages: Sequence[dict[str, Any]], sizes: Sizes) -> dict[str, Any]:
    hidden = sizes.shape["hidden_size"]
    shape = {**sizes.shape, "layers": sizes.layers, "tie_embeddings": True, "init_std": hidden**-0.5}
    return {
        "model": {**shape, "rope": {"theta": 500_000.0}},
        "attention": {"default": "window", "window": {"window": sizes.window}, "full_layers": "every:4"},
        "batch_tokens": sizes.short_batch,
        "stages": list(stages),
        "optim": {"lr": learning_rate(sizes.size)},
        "deterministic": True,  # so that `kept` passes through the weights of `base`
    }


def short_loss(result: Result) -> float:
    """Validation loss of short documents, in sequences of the short length."""
    return float(result["evaluations"][AT_SHORT_LENGTH]["numbers"]["eval_loss"])


def _short_by_sequence(result: Result) -> Losses:
    """`short_loss` of each sequence."""
    (found,) = result["evaluations"][AT_SHORT_LENGTH]["validation_loss"]["by_sequence"].values()
    losses: Losses = found
    return losses


def _trailing(results: Sequence[Result]) -> list[Cell]:
    return [
        Cell(
            one["name"],
            f"seed {one['seed']}",
            trailing_loss(one),
            trailing_by_sequence(one),
            trailing_documents(one),
        )
        for one in results
    ]


def _short(results: Sequence[Result]) -> list[Cell]:
    return [Cell(one["name"], f"seed {one['seed']}", short_loss(one), _short_by_sequence(one)) for one in results]


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained."""
    trailing = compare(_trailing(results))
    found = []
    for ours, theirs, low, high, claim in (
        ("moba", "full", -math.inf, 0.01, "MoBA 128/16 in the full layers is not 0.01 above full attention"),
        ("full", "kept", -0.005, 0.005, "An optimizer that begins afresh changes the loss by less than 0.005"),
        ("masks-late", "full", -math.inf, 0.005, "Document masks in the long stage alone cost less than 0.005"),
        ("masks-late", "masks-never", -math.inf, 0.0, "Without masks before, masks in the long stage lower the loss"),
    ):
        found += trailing.judge(f"{claim}, in the last 2K", {ours: 1.0, theirs: -1.0}, low, high)
    return found
