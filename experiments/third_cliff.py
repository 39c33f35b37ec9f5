"""F6, the third cliff: fine-tuning MoBA layers when few tokens carry loss."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL
from experiments.recall_documents import (
    Recall,
    fine_tuning_documents,
    pretraining_documents,
    thinned,
    write_documents,
)
from experiments.third_cliff_findings import (
    AS_MOBA,
    BAR,
    base_rows,
    base_verdict,
    check_first_losses,
    draw_fine_tuned,
    fine_tuned_rows,
    recall_loss,
    verdicts,
)
from moba_train.data.indexed import corpus_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

BASE = "base"
SHARES = {"0.3": 0.003, "100": 1.0, "1": 0.01, "10": 0.1}
"""Share of the tokens that carry loss, by its name in %, in the order in which they are worth running."""
LAYERS = {"none": "none", "all": "all", "last3": "last:3", "last1": "last:1", "half": "last:4"}
"""`attention.full_layers` of the 8 layers, by the name of the variant."""
VALIDATION, VALIDATION_SHARE = "sft-valid", 0.01
"""Corpus that all variants are evaluated on, and the share of its tokens that count."""
SIZES = Recall(length=2048, facts=68, values=3)
QUICK_SIZES = Recall(length=256, facts=8, values=3, filler_ids=30, key_ids=32, value_ids=32)


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
        "layers. A first base failed: 1.23 nats with MoBA in all layers, 0.63 with full attention "
        "([file](../experiments/results/third-cliff-first-base.json)), as it began to recall in its last third only. "
        "This one learns longer, at a lower rate, and at first has loss only on what can be recalled."
    )
    seeds: ClassVar[int] = 2

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents for the base in three lengths, and for fine-tuning with four masks."""
        sizes = QUICK_SIZES if quick else SIZES
        if not corpus_file(folder / VALIDATION, "idx").exists():  # the last one
            for name, tokens, mask in _corpora(sizes, quick):
                write_documents(folder / name, tokens, mask, sizes.vocab_size)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then the variants."""
        recall = {"recall": ["--attention", "both"]}
        arms = [Arm(BASE, seed, _base_recipe(quick), recall)]
        as_moba = {AS_MOBA: ["attention.full_layers=none", "--tasks", "validation_loss"]}
        for share in ("1", "10") if quick else SHARES:
            for layers in ("none", "all") if quick else LAYERS:
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
        return Finding(list(verdicts(tuned)), [*fine_tuned_rows(tuned), *base_rows(bases)], numbers)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """Loss by mask; gradient norm of the context by layer; its mass by distance in the last layer."""
        draw_fine_tuned([result for result in results if result["name"] != BASE], canvas)


def _corpora(sizes: Recall, quick: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, tokens and loss mask of every corpus."""
    rng = np.random.default_rng(20250218)
    batch = 8 * sizes.length if quick else 1 << 25
    pretrained = replace(sizes, facts=sizes.facts * 3 // 4)
    for name, length in _lengths(sizes).items():
        tokens, recalled = pretraining_documents(pretrained.with_length(length), batch // length, rng)
        yield f"recall-{name}", tokens, None if length == sizes.length else recalled
    held_out = 4 if quick else 512
    yield ("recall-valid", *pretraining_documents(pretrained, held_out, rng))
    tokens, answers = fine_tuning_documents(sizes, batch // 3 // sizes.length, rng)
    for name, share in SHARES.items():
        yield f"sft-{name}", tokens, thinned(answers, sizes.values, share, rng)
    tokens, answers = fine_tuning_documents(sizes, held_out, rng)
    yield VALIDATION, tokens, thinned(answers, sizes.values, VALIDATION_SHARE, rng)


def _lengths(sizes: Recall) -> dict[str, int]:
    """Tokens of a document, by the base's stages."""
    return {"short": sizes.length // 8, "medium": sizes.length // 2, "long": sizes.length}


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
    """Recall over short distances with full attention first, where only what can be recalled has loss, then over the
    whole length with MoBA in all layers and loss on every token. A first base had loss on every token throughout, 400,
    300 and 2000 steps and a rate of 2e-3: it began to recall when the rate had fallen to a quarter, too late
    (results/third-cliff-first-base.json)."""
    lengths = _lengths(QUICK_SIZES if quick else SIZES)
    common = _common(quick)
    steps = (2, 2, 2) if quick else (600, 400, 2400)
    stages = [
        {"name": name, "seq_len": length, "tokens": count * common["batch_tokens"]}
        | {"train": [{"path": f"recall-{name}"}]}
        for (name, length), count in zip(lengths.items(), steps, strict=True)
    ]
    stages[0]["attention"] = FULL
    warmup = sum(stage["tokens"] for stage in stages) // 50
    return common | {
        "data": {"tokenizer": None, "train": stages[-1]["train"], "validation": [{"path": "recall-valid"}]},
        "stages": stages,
        "optim": {"lr": 8e-4, "schedule": {"kind": "cosine", "warmup_tokens": warmup}},
        "evaluation": {"every": 10**6, "sequences": 4 if quick else 256},
        "deterministic": True,  # the same weights wherever the base is trained again
    }


def _fine_tuning_recipe(share: str, layers: str, quick: bool) -> dict[str, Any]:
    """The base's model with full attention in some layers."""
    common = _common(quick)
    steps, length = (3, QUICK_SIZES.length) if quick else (300, SIZES.length)
    tokens = steps * common["batch_tokens"]
    return common | {
        "attention": common["attention"] | {"full_layers": LAYERS[layers]},
        "data": {"tokenizer": None, "train": [{"path": f"sft-{share}"}], "validation": [{"path": VALIDATION}]},
        "stages": [{"name": "sft", "seq_len": length, "tokens": tokens}],
        "optim": {"lr": 5e-4, "weight_decay": 0.0, "schedule": {"kind": "cosine", "warmup_tokens": tokens // 20}},
        "evaluation": {
            "every": 100,
            "at_start": True,
            "sequences": 4 if quick else 512,
            "gradient_reach": {"sequences": 2 if quick else 16, "attention": "own"},
        },
    }
