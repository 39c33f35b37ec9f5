"""F6, the third cliff: fine-tuning MoBA layers when few tokens carry loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from matplotlib.figure import Figure as Canvas

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
    draw_fine_tuned,
    fine_tuned_rows,
    recall_loss,
    verdicts,
    with_equal_starts,
)
from moba_train.data.indexed import corpus_file

BASE = "base"
TEXT = "recall-text"
"""Corpus of whole documents with loss on every token."""
SHARES = {"0.3": 0.003, "1": 0.01, "10": 0.1, "100": 1.0}
"""Share of the tokens that carry loss, by its name in %."""
LAYERS = {"none": "none", "all": "all", "last3": "last:3", "last1": "last:1", "half": "last:4"}
"""`attention.full_layers` of the 8 layers, by the name of the variant."""
ORDER = (("none", "all"), ("last3",), ("last1",), ("half",))
"""Variants in the order in which they are worth running: with all masks those that the claims are about."""
BATCH_DOCUMENTS = {False: 16, True: 4}
"""Documents of full length in a batch, by `quick`."""
FINE_TUNING_STEPS = {False: 300, True: 3}
"""By `quick`."""
VALIDATION, VALIDATION_SHARE = "sft-valid", 0.01
"""Corpus that all variants are evaluated on, and the share of its tokens that count."""
SIZES = Recall(length=2048, facts=68, values=3)
QUICK_SIZES = Recall(length=256, facts=8, values=3, filler_ids=30, key_ids=32, value_ids=32)


class ThirdCliff(Figure):
    """Fine-tuning with few loss tokens, by the layers with full attention."""

    name = "third-cliff"
    title = "F6. The third cliff: sparse loss masks"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 5)
    block: ClassVar[Mapping[str, int]] = {"block_size": 64, "topk": 8}
    """`attention.moba`; with `quick` blocks are a quarter as long, and so is what is selected of them."""

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents for the base in four lengths, and for fine-tuning with four masks."""
        sizes = QUICK_SIZES if quick else SIZES
        if not corpus_file(folder / VALIDATION, "idx").exists():  # the last one
            for name, tokens, mask in _corpora(sizes, quick):
                write_documents(folder / name, tokens, mask, sizes.vocab_size)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then the variants."""
        recall = {"recall": ["--attention", "both"]}
        common = self._common(quick)
        arms = [Arm(BASE, seed, _base_recipe(common, quick), recall)]
        as_moba = {AS_MOBA: ["attention.full_layers=none", "--tasks", "validation_loss"]}
        for variants in ORDER[:1] if quick else ORDER:
            for share in ("1", "10") if quick else SHARES:
                for layers in variants:
                    made = _fine_tuning_recipe(common, share, layers, quick)
                    arms.append(Arm(f"{layers}-{share}", seed, made, as_moba, parent=BASE))
        return arms

    def _common(self, quick: bool) -> dict[str, Any]:
        """What base and fine-tuning have in common. Not compiled: there is more to compile, for each stage and
        attention, than 300 steps of a model of this width can win back."""
        shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
        if not quick:
            shape = {"hidden_size": 256, "intermediate_size": 704, "layers": 8, "heads": 4, "kv_heads": 2}
            shape |= {"head_dim": 128}
        sizes = QUICK_SIZES if quick else SIZES
        block = {key: value // 4 if quick else value for key, value in self.block.items()}
        return {
            "model": shape
            | {"vocab_size": sizes.vocab_size, "tie_embeddings": True, "rope": {"theta": 500_000.0}}
            | {"init_std": shape["hidden_size"] ** -0.5},
            "attention": {"default": "moba", "moba": block},
            "batch_tokens": BATCH_DOCUMENTS[quick] * sizes.length,
            "compile": False,
        }

    def refuses(self, parent: Result, quick: bool) -> str:
        """Nothing is fine-tuned from a base that cannot recall, except where it was given seconds to learn it."""
        return "" if quick or recall_loss(parent) <= BAR else base_verdict(parent)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses of all variants and masks, and the four claims."""
        bases = [result for result in results if result["name"] == BASE]
        tuned, left_out = with_equal_starts([result for result in results if result["name"] != BASE])
        numbers = {"bases": [base_verdict(base) for base in bases]}
        return Finding(list(verdicts(tuned)), [*fine_tuned_rows(tuned), *base_rows(bases)], numbers, left_out)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Loss by mask; gradient norm of the context by layer; its mass by distance in the last layer."""
        tuned, _ = with_equal_starts([result for result in results if result["name"] != BASE])
        draw_fine_tuned(tuned, canvas)


class ThirdCliffSmallerBlocks(ThirdCliff):
    """The third cliff with blocks of half the size."""

    name = "third-cliff-smaller-blocks"
    title = "F6 with smaller blocks"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    block: ClassVar[Mapping[str, int]] = {"block_size": 32, "topk": 16}


def _corpora(sizes: Recall, quick: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, tokens and loss mask of every corpus."""
    rng = np.random.default_rng(20250218)
    pretrained = _pretrained(sizes)
    stages = _base_stages(quick)
    for name, length in _lengths(sizes).items():
        batches = sum(stage.most * stage.shares.get(name, 0.0) for stage in stages)
        documents = round(batches * BATCH_DOCUMENTS[quick] * sizes.length / length)
        tokens, recalled = pretraining_documents(pretrained.with_length(length), documents, rng)
        yield name, tokens, None if name == TEXT else recalled
    held_out = 4 if quick else 512
    yield ("recall-valid", *pretraining_documents(pretrained, held_out, rng))
    tokens, answers = fine_tuning_documents(sizes, FINE_TUNING_STEPS[quick] * BATCH_DOCUMENTS[quick], rng)
    for name, share in SHARES.items():
        yield f"sft-{name}", tokens, thinned(answers, sizes.values, share, rng)
    tokens, answers = fine_tuning_documents(sizes, held_out, rng)
    yield VALIDATION, tokens, thinned(answers, sizes.values, VALIDATION_SHARE, rng)


def _pretrained(sizes: Recall) -> Recall:
    """The base's documents: as many tokens of records as those of fine-tuning, whose facts have three records each."""
    return replace(sizes, facts=sizes.facts * 3 // 4)


def _lengths(sizes: Recall) -> dict[str, int]:
    """Tokens of a document, by the corpora that the base learns from."""
    length = sizes.length
    short = {"recall-one": max(32, length // 32), "recall-short": length // 8, "recall-medium": length // 2}
    return short | {"recall-long": length, TEXT: length}


class _BaseStage(NamedTuple):
    """A stage of the base: `steps` steps and, where there is `learned`, up to `most`, until the loss of recalled tokens
    is at most that."""

    name: str
    seq_len: int
    shares: Mapping[str, float]
    """Shares of the corpora in what it learns from; they add up to 1."""
    steps: int
    most: int
    learned: float | None = None


def _base_stages(quick: bool) -> list[_BaseStage]:
    """Documents of one fact first, in which recall is learned earliest (by this model, on a CPU, from the 40th step of
    4K tokens on), then of some; long documents with the shorter ones among them, which go on teaching what is not
    learned yet; at last the whole text."""
    lengths = _lengths(QUICK_SIZES if quick else SIZES)
    one, short, medium, long, text = lengths
    steps = [(2, 2), (2, 2), (2, 3), (2, 3)] if quick else [(200, 200), (300, 300), (400, 1500), (400, 700)]
    mixed = {short: 0.25, medium: 0.25, long: 0.5}
    return [
        _BaseStage("one", lengths[one], {one: 1.0}, *steps[0]),
        _BaseStage("short", lengths[short], {short: 1.0}, *steps[1]),
        _BaseStage("long", lengths[long], mixed, *steps[2], 0.3),
        _BaseStage("text", lengths[text], {text: 1.0}, *steps[3], BAR / 2),
    ]


def _base_recipe(common: dict[str, Any], quick: bool) -> dict[str, Any]:
    """MoBA in all layers throughout; loss on what can be recalled, and at the end, while the rate falls, on every
    token."""
    batch = common["batch_tokens"]
    stages = [_base_stage(stage, batch) for stage in _base_stages(quick)]
    stages[0]["attention"] = FULL  # the same function: these documents are one block
    schedule = {"kind": "wsd", "warmup_tokens": stages[0]["tokens"] // 3, "decay_tokens": stages[-1]["tokens"]}
    return common | {
        "data": {"tokenizer": None, "train": stages[-1]["train"], "validation": [{"path": "recall-valid"}]},
        "stages": stages,
        "optim": {"lr": 1e-3, "schedule": schedule},
        "evaluation": {"every": 100, "sequences": 4 if quick else 256},
        "deterministic": True,  # the same weights wherever the base is trained again
    }


def _base_stage(stage: _BaseStage, batch: int) -> dict[str, Any]:
    """The stage in a recipe. Only whole documents are evaluated: parts ask for what is not in them."""
    content = {
        "name": stage.name,
        "seq_len": stage.seq_len,
        "tokens": stage.steps * batch,
        "train": [{"path": name, "weight": share} for name, share in stage.shares.items()],
    }
    if stage.learned is None:
        return content | {"evaluate": False}
    return content | {"until": {"metric": "eval_loss", "at_most": stage.learned, "max_tokens": stage.most * batch}}


def _fine_tuning_recipe(common: dict[str, Any], share: str, layers: str, quick: bool) -> dict[str, Any]:
    """The base's model with full attention in some layers."""
    length = (QUICK_SIZES if quick else SIZES).length
    tokens = FINE_TUNING_STEPS[quick] * common["batch_tokens"]
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
