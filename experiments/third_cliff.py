"""F6, the third cliff: fine-tuning MoBA layers when few tokens carry loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    draw_fine_tuned,
    fine_tuned_rows,
    recall_loss,
    verdicts,
    with_equal_starts,
)
from moba_train.data.indexed import corpus_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

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
    claim = (
        "In supervised fine-tuning most tokens carry no loss, and the gradient reaches a MoBA layer's context through"
        " selected blocks alone; MoBA then learns less than full attention. Full attention in the last layers closes "
        "the gap: 1.145 with none, 1.136, 1.117, 1.099 and 1.077 with the last 1, 3, 5 and 10, 1.0755 with all "
        "([MoBA](https://arxiv.org/abs/2502.13189), section 3.2, figure 5). Switching back to MoBA afterwards is said"
        " to do no harm."
    )
    setup = (
        "A model of 8 layers, MoBA 64/8 in all of them, learns synthetic recall: one fact in documents of "
        "64 tokens first, then more in longer ones, with loss only on what can be recalled; at last whole documents of "
        "2K tokens with loss on every token. It has to pass: at most 0.1 nats on each recalled token of held-out "
        "documents, else nothing is fine-tuned; the last two stages go on, up to a limit, until 0.3 and 0.05 nats are "
        "reached. Fine-tuning asks for something that the base has not seen, the first of two values that a key was "
        "given. 10 % of the tokens are such answers, all alike; loss is on every token, on all answers, or on a tenth "
        "or a thirtieth of them (100, 10, 1, 0.3 % of the tokens), so that what carries no loss needs recall as much. "
        "Everything else is equal: first weights, documents and their order, 300 steps, learning rate. The loss is "
        "that of answers in held-out documents, nats per token; *as MoBA* and *as full* evaluate the same weights with "
        "one attention in all layers. A first base failed: 1.23 nats with MoBA in all layers, 0.63 with full attention "
        "([file](../experiments/results/third-cliff-first-base.json)). It had loss on every token, began with "
        "documents of six facts, and went on to longer ones before it recalled, which it did in its last third only. "
        "Seeds were to be taken in their order until the bases of two pass. Of six one did, and the figure was begun "
        "anew with [smaller blocks](#f6-with-smaller-blocks)."
    )
    result: ClassVar[str] = (
        "full attention in the last 3 of 8 layers closes the gap at every mask; one seed, as one base of six passes"
    )
    found: ClassVar[tuple[str, ...]] = (
        "One seed, so no verdict: of six bases that of seed 0 alone passes (0.08 nats on each recalled token). "
        "Those of seeds 1 to 4 recall with full attention in all layers (0.001 to 0.002), and miss the bar with "
        "MoBA, which they were trained with (0.15 to 0.35): what they lack is what the gate leaves out. That of "
        "seed 5 learned more slowly: 0.46 with MoBA, 0.76 with full attention, falling still when its steps ended. "
        "Nothing is fine-tuned from these. Seeds 2 to 5 were trained at the same time, to save a call for each.",
        "At every mask MoBA in all layers ends at 0.40 to 0.80 nats, full attention below 0.05, the last 3 or 4 of 8 "
        "layers full within 0.02 of it; full attention in the last layer alone helps at 10 % (0.27), hardly at 1 and "
        "100 %, and not at 0.3 %.",
        "The gap is 0.75 nats at 0.3 % and 0.40 at 100 %, with 0.75 at 10 % between: that it grows as the mask thins "
        "is not shown.",
        "Switched back to MoBA, models with 3, 4 or 8 full layers end at 3 to 4.5 nats; those with "
        "one full layer do not change.",
        "The other way round, fine-tuning with MoBA and evaluation with full attention is better than MoBA "
        "throughout, at every mask.",
        "MoBA and full attention do not begin alike, 0.35 apart of 13 nats, probably as the base is sure of the value "
        "that is not asked for.",
        "At 0.3 % the gradient of the context, by that of the loss tokens, is 1.4 to 3.5 times as large with full "
        "attention, but for the last layer, and 1.4 to 4.6 times with the last 3 full; with the last 4 full, which "
        "learn as well, only 0.8 to 2.4 times.",
    )
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

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """Loss by mask; gradient norm of the context by layer; its mass by distance in the last layer."""
        tuned, _ = with_equal_starts([result for result in results if result["name"] != BASE])
        draw_fine_tuned(tuned, canvas)


class ThirdCliffSmallerBlocks(ThirdCliff):
    """The third cliff with blocks of half the size."""

    name = "third-cliff-smaller-blocks"
    title = "F6 with smaller blocks"
    claim = "That of [F6](#f6-the-third-cliff)."
    setup = (
        "All as in F6 but the blocks: MoBA 32/16, as many keys. Four bases of F6 recall with full attention and miss "
        "the bar with MoBA, so that their gates leave out what is asked for, and smaller blocks miss less "
        "([F11](#f11-why-moba-finds-needles)). The bar is the same, and models are fine-tuned from those bases of "
        "four seeds that pass it."
    )
    result: ClassVar[str] = (
        "one base of four passes; full attention in the last 3 of 8 layers closes the gap at every mask here, too"
    )
    found: ClassVar[tuple[str, ...]] = (
        "One seed, so no verdict: of four bases that of seed 0 alone passes (0.09 nats on each recalled token). Those "
        "of seeds 1 to 3 recall with full attention (0.001 to 0.002) and miss the bar with MoBA (0.19 to 0.42), so "
        "that smaller blocks were no remedy. With F6 two bases of ten pass.",
        "At every mask MoBA in all layers ends at 0.34 to 0.91 nats, full attention at 0.20 at 0.3 % and below 0.06 "
        "elsewhere, the last 3 or 4 of 8 layers full within 0.02 of it. Full attention in the last layer alone closes "
        "a third of the gap at 10 %, two fifths at 0.3 and 1 %, three fifths at 100 %; in F6 it helped at 10 % alone.",
        "The gap is 0.71 nats at 0.3 %, 0.55 at 1 %, 0.33 at 10 % and 0.38 at 100 %. Larger at 0.3 % than at 100 %, by "
        "0.34 ± 0.05 of evaluation alone, it is in F6, too (0.35); but there it is as large at 10 %.",
        "Switched back to MoBA, models with the last 3, 4 or all 8 layers full end at 1.6 to 3.5 nats, and those with "
        "the last layer full, which in F6 did not change, at 1.1 to 1.7.",
        "Fine-tuning with MoBA and evaluation with full attention is better than MoBA throughout, at every mask, as "
        "in F6.",
        "MoBA and full attention begin alike here, 0.001 apart of 14 nats.",
        "At 0.3 % the gradient of the context, by that of the loss tokens, is with full attention 0.5 to 0.8 times "
        "MoBA's in the first two layers and 1.1 to 1.8 times in the others, whether 3, 4 or 8 layers are full.",
    )
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
