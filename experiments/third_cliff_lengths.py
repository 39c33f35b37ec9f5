"""F21: F6's sparse loss masks in trajectories of 32K to 128K tokens.

A trajectory is a document of F6's fine-tuning: what tools return is filler with statements, and each answer of the
assistant, which alone carries loss, is what was stated first of a key. All lengths have as many answers, so the share
of the tokens with loss falls as trajectories grow: 1.2, 0.6 and 0.3 %. The base has full attention, as published models
have, and layers become MoBA in fine-tuning alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import FULL as GREY
from benchmarks.plotting import GREEN, MOBA
from experiments.comparison import Cell, Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL
from experiments.readings import validation_by_sequence, validation_loss
from experiments.recall_documents import Recall, fine_tuning_documents, pretraining_documents, write_documents
from experiments.third_cliff_findings import BAR, first_loss
from moba_train.data.indexed import corpus_file

BASE = "base"
LENGTHS = {"32k": 32_768, "64k": 65_536, "128k": 131_072}
"""Tokens of a trajectory, by name."""
LAYERS = {"none": "none", "last2": "last:2", "all": "all"}
"""`attention.full_layers` of the 8 layers, by the name of the variant."""
WORDS = {"none": "MoBA", "last2": "last 2 of 8 full", "all": "full"}
SIZES = Recall(length=LENGTHS["128k"], facts=128, values=3)
QUICK_SIZES = Recall(length=1024, facts=4, values=3, filler_ids=30, key_ids=32, value_ids=32)
SHORTER = {False: 1, True: 128}
"""Divides lengths, by `quick`."""
STEPS = {False: 150, True: 2}
"""Steps of fine-tuning, of one trajectory each, by `quick`."""
HELD_OUT = {False: 16, True: 2}
"""Documents that are evaluated, of each length, by `quick`."""
NEAR_BATCH = 32_768
"""Tokens of a step of the base's stages of short documents."""
FAR_VALIDATION = "far-valid"


class ThirdCliffLengths(Figure):
    """Trajectories of 32K to 128K tokens whose answers alone carry loss, by the layers with full attention."""

    name = "third-cliff-lengths"
    title = "F21. Sparse loss masks in long trajectories"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)
    corpus: ClassVar[str] = ""

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents for the base in six lengths, and trajectories in three."""
        sizes = QUICK_SIZES if quick else SIZES
        if not corpus_file(folder / FAR_VALIDATION, "idx").exists():  # the last one
            for name, tokens, mask in _corpora(sizes, quick):
                write_documents(folder / name, tokens, mask, sizes.vocab_size)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then the variants, those of the claim about 128K first."""
        arms = [Arm(BASE, seed, _base_recipe(quick))]
        for length in reversed(LENGTHS):
            layers = [one for one in LAYERS if one != "all" or length == "32k"]
            arms += [Arm(f"{one}-{length}", seed, _tuning_recipe(one, length, quick), parent=BASE) for one in layers]
        return arms

    def refuses(self, parent: Result, quick: bool) -> str:
        """Nothing is fine-tuned from a base that cannot recall over 128K tokens."""
        return "" if quick or validation_loss(parent) <= BAR else _base_verdict(parent)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses of all variants, and the claims."""
        tuned = [result for result in results if result["name"] != BASE]
        bases = [_base_verdict(result) for result in results if result["name"] == BASE]
        rows = [["layers", "trajectory", "tokens with loss", "at step 0", "after", "seeds"]]
        for length in LENGTHS:
            for layers in LAYERS:
                runs = [result for result in tuned if result["name"] == f"{layers}-{length}"]
                if runs:
                    share = 100 * SIZES.facts * SIZES.values / LENGTHS[length]
                    losses = [f"{np.mean([value(run) for run in runs]):.4f}" for value in (first_loss, validation_loss)]
                    rows.append([WORDS[layers], length.upper(), f"{share:.1f} %", *losses, f"{len(runs)}"])
        return Finding(list(_verdicts(tuned)), rows, {"bases": bases})

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Loss of the answers by the length of the trajectory; points are seeds."""
        axes = canvas.subplots()
        for layers, colour in (("none", MOBA), ("last2", GREEN), ("all", GREY)):
            runs = {length: [one for one in results if one["name"] == f"{layers}-{length}"] for length in LENGTHS}
            found = {length: [validation_loss(one) for one in of_length] for length, of_length in runs.items()}
            trained = [length for length, losses in found.items() if losses]
            means = [np.mean(found[length]) for length in trained]
            axes.plot([LENGTHS[length] for length in trained], means, color=colour, label=WORDS[layers])
            for length in trained:
                axes.plot([LENGTHS[length]] * len(found[length]), found[length], "o", ms=3, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*LENGTHS.values()], [length.upper() for length in LENGTHS])
        axes.set_yscale("log")
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
        axes.minorticks_off()
        axes.set_xlabel("tokens of a trajectory")
        axes.set_ylabel("loss of the answers, nats")
        axes.legend()


def _base_verdict(base: Result) -> str:
    loss = validation_loss(base)
    passed = "passes" if loss <= BAR else "FAILS"
    return f"the base of seed {base['seed']} {passed}: {loss:.4f} nats on each recalled token at 128K; the bar is {BAR}"


def _verdicts(tuned: Sequence[Result]) -> Iterator[Verdict]:
    """The claims, written before the first arm was trained, as far as there are arms for them."""
    cells = [
        Cell(run["name"], f"seed {run['seed']}", validation_loss(run), validation_by_sequence(run)) for run in tuned
    ]
    judge = compare(cells).judge
    gap = {"none-128k": 1.0, "last2-128k": -1.0}
    yield from judge("At 128K, full attention in the last 2 layers is better than MoBA", gap, 0.0, math.inf)
    wider = gap | {"none-32k": -1.0, "last2-32k": 1.0}
    yield from compare([cell._replace(by_sequence=()) for cell in cells]).judge(
        "The gap at 128K is larger than at 32K", wider, 0.0, math.inf
    )
    close = {"last2-32k": 1.0, "all-32k": -1.0}
    yield from judge("At 32K, the last 2 layers full are within 0.05 of full attention", close, -math.inf, 0.05)


def _near(quick: bool) -> dict[str, Recall]:
    """Documents of the base's first stages by their corpora: those of F6, of 2K tokens with 51 facts, and shorter."""
    whole = replace(QUICK_SIZES, length=256, facts=6) if quick else replace(SIZES, length=2048, facts=51)
    parts = {"near-one": 32, "near-short": 8, "near-medium": 2, "near-long": 1}
    return {name: whole.with_length(max(32, whole.length // part)) for name, part in parts.items()}


def _far(quick: bool) -> dict[str, Recall]:
    """Documents of the base's last stages by their corpora, all with as many records as a trajectory has."""
    sizes = QUICK_SIZES if quick else SIZES
    sizes = replace(sizes, facts=sizes.facts * 3 // 4)
    return {f"far-{part}k": replace(sizes, length=sizes.length * part // 128) for part in (8, 32, 128)}


def _corpora(sizes: Recall, quick: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, tokens and loss mask of every corpus."""
    rng = np.random.default_rng(20250218)
    stages = _base_stages(quick)
    for name, of_document in (_near(quick) | _far(quick)).items():
        read = sum(
            stage.get("until", {}).get("max_tokens", stage["tokens"]) * source["weight"]
            for stage in stages
            for source in stage["train"]
            if source["path"] == name
        )
        yield (name, *pretraining_documents(of_document, math.ceil(read / of_document.length) + 1, rng))
    for length, tokens in LENGTHS.items():
        trajectory = replace(sizes, length=tokens // SHORTER[quick])
        yield (f"trajectories-{length}", *fine_tuning_documents(trajectory, STEPS[quick] + 1, rng))
        yield (f"trajectories-{length}-valid", *fine_tuning_documents(trajectory, HELD_OUT[quick], rng))
    *_, longest = _far(quick).values()
    yield (FAR_VALIDATION, *pretraining_documents(longest, HELD_OUT[quick] // 2, rng))


def _base_stages(quick: bool) -> list[dict[str, Any]]:
    """Documents of one fact first, as in F6, then of some, then shorter and longer ones mixed; far ones until they are
    recalled, and again while the rate falls."""
    far = {name: sizes.length for name, sizes in _far(quick).items()}
    batch = NEAR_BATCH // SHORTER[quick]
    far_batch = max(far.values())
    near_steps = (2, 2, 2) if quick else (200, 300, 1200)
    far_steps, most_steps, last_steps = (2, 3, 2) if quick else (60, 300, 30)
    one, short, medium, long = _near(quick)
    mixed = {short: 0.25, medium: 0.25, long: 0.5}
    near = [
        _stage(name, _near(quick)[name].length, steps * batch, near_shares) | {"evaluate": False, "batch_tokens": batch}
        for name, near_shares, steps in zip(
            (one, short, long), ({one: 1.0}, {short: 1.0}, mixed), near_steps, strict=True
        )
    ]
    shares = dict(zip(far, (0.1, 0.3, 0.6), strict=True))
    until = {"metric": "eval_loss", "at_most": BAR / 2, "max_tokens": most_steps * far_batch}
    learning = _stage("far", far_batch, far_steps * far_batch, shares) | {"until": until}
    return [*near, learning, _stage("settled", far_batch, last_steps * far_batch, shares)]


def _stage(name: str, seq_len: int, tokens: int, shares: dict[str, float]) -> dict[str, Any]:
    """A stage that reads corpora with these shares."""
    train = [{"path": path, "weight": share} for path, share in shares.items()]
    return {"name": name, "seq_len": seq_len, "tokens": tokens, "train": train}


def _model(quick: bool) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 3, "heads": 2, "kv_heads": 1}
    if not quick:
        shape = {"hidden_size": 256, "intermediate_size": 704, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 128}
    vocabulary = (QUICK_SIZES if quick else SIZES).vocab_size
    return {**shape, "vocab_size": vocabulary, "tie_embeddings": True, "init_std": shape["hidden_size"] ** -0.5} | {
        "rope": {"theta": 500_000.0}
    }


def _base_recipe(quick: bool) -> dict[str, Any]:
    """Full attention throughout, and loss on what can be recalled."""
    stages = _base_stages(quick)
    schedule = {"kind": "wsd", "warmup_tokens": stages[0]["tokens"] // 3, "decay_tokens": stages[-1]["tokens"]}
    return {
        "model": _model(quick),
        "attention": FULL,
        "batch_tokens": stages[-1]["seq_len"],
        "compile": False,
        "data": {"tokenizer": None, "train": stages[-1]["train"], "validation": [{"path": FAR_VALIDATION}]},
        "stages": stages,
        "optim": {"lr": 1e-3, "schedule": schedule},
        "evaluation": {"every": 20, "sequences": HELD_OUT[quick] // 2},
        "deterministic": True,  # the same weights wherever the base is trained again
    }


def _tuning_recipe(layers: str, length: str, quick: bool) -> dict[str, Any]:
    """One trajectory a step, with loss on its answers."""
    seq_len = LENGTHS[length] // SHORTER[quick]
    tokens = STEPS[quick] * seq_len
    blocks = {"block_size": 16, "topk": 2} if quick else {"block_size": 512, "topk": 16}
    path = f"trajectories-{length}"
    return {
        "model": _model(quick),
        "attention": {"default": "moba", "moba": blocks, "full_layers": LAYERS[layers]},
        "batch_tokens": seq_len,
        "compile": False,
        "data": {"tokenizer": None, "train": [{"path": path}], "validation": [{"path": f"{path}-valid"}]},
        "stages": [{"name": "sft", "seq_len": seq_len, "tokens": tokens}],
        "optim": {"lr": 5e-4, "weight_decay": 0.0, "schedule": {"kind": "cosine", "warmup_tokens": tokens // 20}},
        "evaluation": {"every": 50, "at_start": True, "sequences": HELD_OUT[quick]},
    }
