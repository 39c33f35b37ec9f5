"""F6, the third cliff: fine-tuning MoBA layers when few tokens carry loss."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from benchmarks.plotting import GREY, plain
from experiments.comparison import Cell, Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.fits import validation_loss
from experiments.models import FULL
from experiments.recall_documents import (
    Recall,
    fine_tuning_documents,
    pretraining_documents,
    thinned,
    write_documents,
)
from moba_train.data.indexed import corpus_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

BASE = "base"
BAR = 0.1
"""Nats: the most that a base may lose on a recalled token. A token whose most likely prediction is wrong loses at least
ln 2, so that no more than a seventh of them can be wrong."""
SHARES = {"0.3": 0.003, "100": 1.0, "1": 0.01, "10": 0.1}
"""Share of the tokens that carry loss, by its name in %, in the order in which they are worth running."""
LAYERS = {"none": "none", "all": "all", "last3": "last:3", "last1": "last:1", "half": "last:4"}
"""`attention.full_layers` of the 8 layers, by the name of the variant."""
VALIDATION_SHARE = 0.01
AS_MOBA = "as-moba"
"""Name of the evaluation of the same weights with MoBA in all layers, and with full attention in all layers."""
SIZES = Recall(length=2048, facts=68, values=3)
QUICK_SIZES = Recall(length=256, facts=8, values=3, filler_ids=30, key_ids=32, value_ids=32)
SAME = 1e-3
"""Nats by which two losses of the same weights may differ."""
_COLOURS = {"none": "#d9480f", "last1": "#c2850c", "last3": "#2b8a3e", "half": "#1098ad", "all": "#797979"}
_WORDS = {"none": "MoBA", "last1": "last 1 full", "last3": "last 3 full", "half": "last half full", "all": "full"}


class ThirdCliff(Figure):
    """Fine-tuning with few loss tokens, by the layers with full attention."""

    name = "third-cliff"
    title = "F6. The third cliff: sparse loss masks"
    claim = (
        "In supervised fine-tuning most tokens carry no loss, and the gradient reaches a MoBA layer's context through"
        " selected blocks alone; MoBA then learns less than full attention. Full attention in the last layers closes "
        "the gap: 1.145 with none, 1.136, 1.117, 1.099 and 1.077 with the last 1, 3, 5 and 10, 1.0755 with all "
        "([MoBA](https://arxiv.org/abs/2502.13189), section 3.2, figure 5). Switching back to MoBA afterwards is said"
        " to do no harm."
    )
    setup = (
        "A model of 8 layers learns synthetic recall in documents of 2K tokens, MoBA 64/8 in every layer at the end, "
        "and has to pass: at most 0.1 nats on each recalled token, else nothing is fine-tuned. Fine-tuning asks for "
        "something that the base has not seen, the first of two values that a key was given. 10 % of the tokens are "
        "such answers, all alike; loss is on every token, on all answers, or on a tenth or a thirtieth of them (100, "
        "10, 1, 0.3 % of the tokens), so that what carries no loss needs recall as much. Everything else is equal: "
        "first weights, documents and their order, 300 steps, learning rate. The loss is that of answers in held-out "
        "documents, nats per token; *as MoBA* and *as full* evaluate the same weights with one attention in all "
        "layers."
    )
    seeds: ClassVar[int] = 2

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents for the base in three lengths, and for fine-tuning with four masks."""
        sizes = QUICK_SIZES if quick else SIZES
        for name, tokens, mask in _corpora(sizes, quick):
            if not corpus_file(folder / name, "idx").exists():
                write_documents(folder / name, tokens, mask, sizes.vocab_size)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then the variants."""
        recall = {"recall": ["--attention", "both"]}
        arms = [Arm(BASE, seed, _base_recipe(quick), recall)]
        as_moba = {AS_MOBA: ["attention.full_layers=none", "--tasks", "validation_loss"]}
        for share in ("1", "10") if quick else SHARES:
            for layers in ("none", "all", "last1") if quick else LAYERS:
                made = _fine_tuning_recipe(share, layers, quick)
                arms.append(Arm(f"{layers}-{share}", seed, made, as_moba, parent=BASE))
        return arms

    def refuses(self, parent: Result, quick: bool) -> str:
        """Nothing is fine-tuned from a base that cannot recall, except where it was given seconds to learn it."""
        return "" if quick or recall_loss(parent) <= BAR else base_verdict(parent)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses of all variants and masks, and the four claims."""
        bases = [result for result in results if result["name"] == BASE]
        tuned = [result for result in results if result["name"] != BASE]
        check_first_losses(tuned)
        numbers = {"bases": [base_verdict(base) for base in bases]}
        return Finding(list(_verdicts(tuned)), [*_rows(tuned), *_base_rows(bases)], numbers)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """Loss by mask; gradient norm of the context by layer; its mass by distance in the last layer."""
        losses, by_layer, by_distance = canvas.subplots(1, 3)
        tuned = [result for result in results if result["name"] != BASE]
        _draw_losses(losses, tuned)
        thinnest = min((_share(result) for result in tuned), key=float, default="")
        for layers in LAYERS:
            runs = [result for result in tuned if result["name"] == f"{layers}-{thinnest}"]
            if runs:
                found = [_gradients(run) for run in runs]
                norms = np.mean([[layer["context_norm"] for layer in one] for one, _ in found], axis=0)
                mass = np.mean([one[-1]["mass"] for one, _ in found], axis=0)
                by_layer.plot(norms, "o-", ms=3, lw=1.2, color=_COLOURS[layers])
                by_distance.plot(mass, "o-", ms=3, lw=1.2, color=_COLOURS[layers])
                by_distance.set_xticks(range(len(mass)), found[0][1], rotation=60, fontsize=6)
        by_layer.set_yscale("log")
        for axes, title, label in (
            (losses, "loss of the answers, nats", "tokens with loss, %"),
            (by_layer, f"gradient norm, context / loss tokens, {thinnest} %", "layer"),
            (by_distance, "last layer: share of its gradient", "distance to the loss token"),
        ):
            axes.set_title(title, color=GREY, fontsize=9, loc="left")
            axes.set_xlabel(label, color=GREY)
            plain(axes)


def _corpora(sizes: Recall, quick: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, tokens and loss mask of every corpus."""
    rng = np.random.default_rng(20250218)
    batch = 8 * sizes.length if quick else 1 << 25
    pretrained = replace(sizes, facts=sizes.facts * 3 // 4)
    for length in _lengths(sizes):
        tokens, _ = pretraining_documents(pretrained.with_length(length), batch // length, rng)
        yield f"recall-{length}", tokens, None
    held_out = 4 if quick else 512
    yield ("recall-valid", *pretraining_documents(pretrained, held_out, rng))
    tokens, answers = fine_tuning_documents(sizes, batch // 3 // sizes.length, rng)
    for name, share in SHARES.items():
        yield f"sft-{name}", tokens, thinned(answers, sizes.values, share, rng)
    tokens, answers = fine_tuning_documents(sizes, held_out, rng)
    yield "sft-valid", tokens, thinned(answers, sizes.values, max(VALIDATION_SHARE, 1 / sizes.length), rng)


def _lengths(sizes: Recall) -> tuple[int, ...]:
    """Of the base's stages."""
    return sizes.length // 8, sizes.length // 2, sizes.length


def _common(quick: bool) -> dict[str, Any]:
    """What base and fine-tuning have in common."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
    if not quick:
        shape = {"hidden_size": 256, "intermediate_size": 704, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 128}
    sizes = QUICK_SIZES if quick else SIZES
    block = {"block_size": 16, "topk": 2} if quick else {"block_size": 64, "topk": 8}
    return {
        "model": shape | {"vocab_size": sizes.vocab_size, "init_std": shape["hidden_size"] ** -0.5},
        "attention": {"default": "moba", "moba": block},
        "batch_tokens": 4 * sizes.length if quick else 16 * sizes.length,
    }


def _base_recipe(quick: bool) -> dict[str, Any]:
    """Recall over short distances with full attention first, then over the whole length with MoBA in all layers."""
    lengths = _lengths(QUICK_SIZES if quick else SIZES)
    common = _common(quick)
    steps = (2, 2, 2) if quick else (400, 300, 1200)
    stages = [
        {"name": str(length), "seq_len": length, "tokens": count * common["batch_tokens"]}
        | {"train": [{"path": f"recall-{length}"}]}
        for length, count in zip(lengths, steps, strict=True)
    ]
    stages[0]["attention"] = FULL
    warmup = sum(stage["tokens"] for stage in stages) // 50
    return common | {
        "data": {"tokenizer": None, "train": [{"path": "sft-10"}], "validation": [{"path": "recall-valid"}]},
        "stages": stages,
        "optim": {"lr": 2e-3, "schedule": {"kind": "cosine", "warmup_tokens": warmup}},
        "evaluation": {"every": 200, "sequences": 4 if quick else 256},
        "deterministic": True,  # the same weights wherever the base is trained again
    }


def _fine_tuning_recipe(share: str, layers: str, quick: bool) -> dict[str, Any]:
    """The base's model with full attention in some layers."""
    common = _common(quick)
    steps, length = (3, QUICK_SIZES.length) if quick else (300, SIZES.length)
    tokens = steps * common["batch_tokens"]
    return common | {
        "attention": common["attention"] | {"full_layers": LAYERS[layers]},
        "data": {"tokenizer": None, "train": [{"path": f"sft-{share}"}], "validation": [{"path": "sft-valid"}]},
        "stages": [{"name": "sft", "seq_len": length, "tokens": tokens}],
        "optim": {"lr": 5e-4, "weight_decay": 0.0, "schedule": {"kind": "cosine", "warmup_tokens": tokens // 20}},
        "evaluation": {
            "every": 100,
            "at_start": True,
            "sequences": 4 if quick else 512,
            "gradient_reach": {"sequences": 2 if quick else 16, "attention": "own"},
        },
    }


def recall_loss(base: Result, attention: str = "moba") -> float:
    """Mean loss of the tokens that only recall predicts, with one attention in all layers, nats."""
    return float(base["evaluations"]["recall"]["validation_loss"][attention])


def base_verdict(base: Result) -> str:
    """Whether a base passes, in words."""
    loss, full = recall_loss(base), recall_loss(base, "full")
    passed = "passes" if loss <= BAR else "FAILS"
    return (
        f"the base of seed {base['seed']} {passed}: {loss:.4f} nats on each recalled token with MoBA in all layers, "
        f"{full:.4f} with full attention; the bar is {BAR}"
    )


def first_loss(result: Result) -> float:
    """Loss of the answers before the first step, with the variant's own layers."""
    return float(next(entry["eval_loss"] for entry in result["history"] if entry["evaluation"] == "validation_loss"))


def check_first_losses(tuned: Sequence[Result]) -> None:
    """Variants with the same layers and seed begin with the same loss, whatever their mask: they have the same weights.

    Raises ValueError where they have not.
    """
    found: dict[tuple[str, int], Result] = {}
    for result in tuned:
        other = found.setdefault((_layers(result), result["seed"]), result)
        if abs(first_loss(result) - first_loss(other)) > SAME:
            raise ValueError(
                f"{result['name']} and {other['name']} of seed {result['seed']} began with losses of "
                f"{first_loss(result):.4f} and {first_loss(other):.4f}: not with the same weights"
            )


def as_attention(result: Result, attention: str) -> float:
    """Loss of the answers after fine-tuning, with one attention in all layers."""
    return float(result["evaluations"][AS_MOBA]["validation_loss"][attention])


def _verdicts(tuned: Sequence[Result]) -> Iterator[Verdict]:
    """The claims, as far as there are arms for them."""
    cells = [Cell(result["name"], f"seed {result['seed']}", validation_loss(result)) for result in tuned]
    arms = {cell.arm for cell in cells}
    start = [Cell(_layers(result), f"seed {result['seed']}", first_loss(result)) for result in tuned]
    if {"none", "all"} <= {cell.arm for cell in start}:
        claim = "Before the first step MoBA and full attention have the same loss, within 0.05"
        yield Verdict(claim, compare(start).difference("none", "all"), -0.05, 0.05)
    thin = min((_share(result) for result in tuned), key=float, default="")
    thick = max((_share(result) for result in tuned), key=float, default="")
    gap = {f"none-{thin}": 1.0, f"all-{thin}": -1.0}
    if gap.keys() <= arms:
        yield Verdict(f"At {thin} % MoBA is worse than full attention", compare(cells).contrast(gap), 0.0, math.inf)
    wider = gap | {f"none-{thick}": -1.0, f"all-{thick}": 1.0}
    if len(wider) == 4 and wider.keys() <= arms:
        claim = f"The gap at {thin} % is larger than at {thick} %"
        yield Verdict(claim, compare(cells).contrast(wider), 0.0, math.inf)
    if {f"last3-{thin}", f"none-{thin}"} <= arms:
        claim = f"At {thin} % full attention in the last 3 layers is better than MoBA"
        yield Verdict(claim, compare(cells).difference(f"last3-{thin}", f"none-{thin}"), -math.inf, 0.0)
    back = [Cell(result["name"], f"seed {result['seed']}", as_attention(result, "moba")) for result in tuned]
    for layers in ("last3", "all"):
        if {f"{layers}-{thin}", f"none-{thin}"} <= arms:
            claim = f"At {thin} %, {_WORDS[layers]} in fine-tuning and MoBA after it is no worse than MoBA in both"
            yield Verdict(claim, compare(back).difference(f"{layers}-{thin}", f"none-{thin}"), -math.inf, 0.0)


def _rows(tuned: Sequence[Result]) -> list[list[str]]:
    rows = [["layers", "tokens with loss", "at step 0", "after", "as MoBA", "as full", "reach, first and last layer"]]
    for name in dict.fromkeys(result["name"] for result in tuned):
        runs = [result for result in tuned if result["name"] == name]
        values = [
            first_loss,
            validation_loss,
            lambda run: as_attention(run, "moba"),
            lambda run: as_attention(run, "full"),
        ]
        losses = [f"{statistics.mean(map(value, runs)):.4f}" for value in values]
        reach = [statistics.mean(_gradients(run)[0][place]["reach"] for run in runs) for place in (0, -1)]
        rows.append(
            [_WORDS[_layers(runs[0])], f"{_share(runs[0])} %", *losses, " ".join(f"{one:.0%}" for one in reach)]
        )
    return rows


def _base_rows(bases: Sequence[Result]) -> list[list[str]]:
    """What the bases recall, in the columns of `_rows`."""
    return [
        [
            f"**base, seed {base['seed']}{'' if recall_loss(base) <= BAR else ': FAILS'}**",
            "recalled",
            "–",
            "–",
            f"{recall_loss(base):.4f}",
            f"{recall_loss(base, 'full'):.4f}",
            "–",
        ]
        for base in bases
    ]


def _gradients(result: Result) -> tuple[list[dict[str, Any]], list[str]]:
    """For every layer, what the last gradient reach found with the variant's own layers; and the names of its
    distances."""
    found = result["stages"]["sft"]["gradient_reach"]["gradient_reach_layers"]
    return list(found["layers"][found["attention"]]), list(found["distances"])


def _draw_losses(axes: "Axes", tuned: Sequence[Result]) -> None:
    for layers, colour in _COLOURS.items():
        runs = [result for result in tuned if _layers(result) == layers]
        shares = sorted({float(_share(run)) for run in runs})
        means = [statistics.mean(validation_loss(run) for run in runs if float(_share(run)) == one) for one in shares]
        axes.plot(shares, means, lw=1.3, color=colour, label=_WORDS[layers])
        axes.plot([float(_share(run)) for run in runs], list(map(validation_loss, runs)), ".", ms=4, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, labelcolor=GREY, fontsize=7)


def _layers(result: Result) -> str:
    return str(result["name"]).partition("-")[0]


def _share(result: Result) -> str:
    return str(result["name"]).partition("-")[2]
