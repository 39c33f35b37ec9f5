"""F10: every kind of attention at one size and one token budget, at 8K and at 32K."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, GREEN, INK
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, batch_tokens, learning_rate, recipe
from experiments.needle_documents import SHARE, needle_corpus, write_needles
from experiments.rates import TIMED
from experiments.readings import (
    keys_text,
    needle,
    needle_in_history,
    own_trailing_by_sequence,
    trailing_by_sequence,
    trailing_documents,
    trailing_loss,
    validation_loss,
)

SIZE = "10m"
TOKENS = 100_000_000
LENGTHS = {"8k": 8192, "32k": 32_768}
QUICK_LENGTHS = {"1k": 1024}
KEYS = 1536
"""Keys of a query, about, in all kinds that select: 3 blocks of 512."""
READ_WITH_INFLLM = "infllm"
TIMED_STEPS = 60
_GATE_TRAINING = {"warmup": 0.05, "sparse": 0.15}
"""Shares of the tokens of kinds whose gate learns from full attention: the gate alone, then the model with it."""


class Mechanism(NamedTuple):
    """A kind with its options."""

    kind: str
    options: Mapping[str, Any]
    quick: Mapping[str, Any]
    """Options that are other ones in the quick form, whose blocks are small."""
    distilled: bool = False
    """Whether its gate learns from full attention, in stages of its own."""


_SMALL = {"block_size": 64, "topk": 3}
MECHANISMS: dict[str, Mechanism] = {
    "full": Mechanism("full", {}, {}),
    "moba": Mechanism("moba", {"block_size": 512, "topk": 3}, _SMALL),
    "moba-128": Mechanism("moba", {"block_size": 128, "topk": 12}, {"block_size": 16, "topk": 12}),
    "moba-128-conv": Mechanism(
        "moba", {"block_size": 128, "topk": 12, "key_conv": 3}, {"block_size": 16, "topk": 12, "key_conv": 3}
    ),
    "moba_v1-sum": Mechanism("moba_v1", {"block_size": 512, "topk": 3, "merge": "sum"}, _SMALL),
    "moba_v1-gate": Mechanism("moba_v1", {"block_size": 512, "topk": 3, "merge": "gate"}, _SMALL),
    "moba_v05": Mechanism("moba_v05", {"block_size": 512, "topk": 3}, _SMALL),
    "nsa": Mechanism("nsa", {"block_size": 64, "topk": 16, "window": 512}, {"topk": 3, "window": 64}),
    "infllm_v2": Mechanism(
        "infllm_v2",
        {"block_size": 64, "topk": 24, "local_blocks": 8, "dense_len": KEYS},
        {"topk": 4, "local_blocks": 2, "dense_len": 256},
    ),
    "seer": Mechanism("seer", {"block_size": 64, "topk": 24}, {"topk": 4}, distilled=True),
    "msa": Mechanism("msa", {"block_size": 128, "topk": 12}, {"topk": 3}, distilled=True),
    "moa": Mechanism("moa", {"alpha": KEYS - 64, "sink_tokens": 64}, {"alpha": 192}),
    "lightning": Mechanism("lightning", {"decay": "geometric"}, {}),
    "kda": Mechanism("kda", {}, {}),
}
QUICK = ("full", "moba", "seer", "lightning")


class Mechanisms(Figure):
    """All kinds of attention: validation and trailing loss, needles, tokens per second, parameters of their own."""

    name = "mechanisms"
    height = 3.4
    title = "F10. All mechanisms"
    seeds: ClassVar[tuple[int, ...]] = (0,)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Full attention and MoBA first, 8K before 32K; then the arms that are timed."""
        lengths = QUICK_LENGTHS if quick else LENGTHS
        names = QUICK if quick else MECHANISMS
        each = [(name, length, tokens, seed, quick) for length, tokens in lengths.items() for name in names]
        return [*(_arm(*one) for one in each), *(_timed_arm(*one) for one in (each[:1] if quick else each))]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents with hidden numbers for each length; a fifth of the training tokens, read once."""
        for length in (QUICK_LENGTHS if quick else LENGTHS).values():
            write_needles(corpus, folder, length, 1 << 15 if quick else int(SHARE * TOKENS))

    def find(self, results: Sequence[Result]) -> Finding:
        """One row for each kind and length."""
        speeds = {result["name"]: result["tokens_per_s"] for result in results if _is_timed(result)}
        results = [result for result in results if not _is_timed(result)]
        losses = ["validation loss", "trailing loss", *ABOVE]
        heads = ["mean keys", *losses, "needle", "in history", "tokens/s", "parameters of its own", "seeds"]
        rows = [["", *heads]]
        for name in dict.fromkeys(result["name"] for result in results):
            own = [result for result in results if result["name"] == name]
            losses = [f"{_mean(own, validation_loss):.4f}", f"{_mean(own, trailing_loss):.4f}"]
            mechanism, length = _mechanism_and_length(name)
            same_length = [result for result in results if _mechanism_and_length(result["name"])[1] == length]
            losses += above(_cells(same_length), mechanism, "full")
            speed = f"{speeds[TIMED + name]:,.0f}" if TIMED + name in speeds else "–"
            added = _added_parameters(own[0], results)
            extra = "–" if added is None else f"{added:,}"
            found = [f"{_mean(own, needle):.2f}", f"{_mean(own, needle_in_history):.2f}"]
            rows.append([name, keys_text(own[0]), *losses, *found, speed, extra, str(len(own))])
            rows += _infllm_rows(own)
        return Finding(_verdicts(results), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Trailing loss above full attention, with the error of evaluation where it is known, and needles."""
        left, right = canvas.subplots(1, 2, sharey=True)
        results = [result for result in results if not _is_timed(result)]
        names = list(dict.fromkeys(_mechanism_and_length(result["name"])[0] for result in results))[::-1]
        for index, length in enumerate(dict.fromkeys(_mechanism_and_length(result["name"])[1] for result in results)):
            colour = (BLUE, GREEN)[index % 2]
            own = [result for result in results if _mechanism_and_length(result["name"])[1] == length]
            full = [trailing_loss(result) for result in own if result["name"] == f"full-{length}"]
            base = statistics.mean(full) if full else 0.0
            for result in own:
                name, _ = _mechanism_and_length(result["name"])
                place = names.index(name) + 0.15 * (1 - 2 * index)
                style: dict[str, Any] = {"fmt": "o", "color": colour, "elinewidth": 1}
                left.errorbar(trailing_loss(result) - base, place, xerr=_evaluation_error(result, own), **style)
                label = length if name == names[-1] and not result["seed"] else None
                right.errorbar(needle_in_history(result), place, label=label, **style)
        left.set_xscale("symlog", linthresh=0.1)  # one arm does not train, and would squeeze the others
        left.xaxis.set_major_formatter("{x:g}")
        left.set_xlabel("trailing loss above full, nats")
        right.set_xlabel("share of needles in history found")
        left.set_yticks(range(len(names)), names)
        left.axvline(0, color=INK, lw=0.8)
        canvas.legend(loc="outside upper left", ncols=2)


def evaluation(seq_len: int, quick: bool) -> dict[str, Any]:
    """What arms with needles are evaluated with."""
    if quick:
        needle = {"lengths": [seq_len], "depths": [0, 50], "samples": 1, "attention": "own"}
        return {"sequences": 2, "position_wise": {"bucket": 256, "sequences": 2, "attention": "own"}, "needle": needle}
    return {
        "sequences": 2_097_152 // seq_len,
        "position_wise": {"bucket": 2048, "sequences": 64, "attention": "own"},
        "needle": {"samples": 8, "attention": "own"},
    }


def shape(seq_len: int, tokens: int, quick: bool) -> tuple[int, int, int, dict[str, Any]]:
    """Length, training tokens, tokens of a step and evaluation of arms with needles."""
    budget = (4096, 2048) if quick else (tokens, batch_tokens(seq_len))
    return (seq_len, *budget, evaluation(seq_len, quick))


def _arm(name: str, length: str, seq_len: int, seed: int, quick: bool) -> Arm:
    mechanism = MECHANISMS[name]
    size = "small" if quick else SIZE
    content = recipe(size, _section(mechanism, quick), *shape(seq_len, TOKENS, quick))
    if mechanism.distilled:
        *short, whole = content["stages"]
        content["stages"] = short + _distilled_stages(mechanism.kind, size, whole)
    evaluations = {}
    if name == "full":
        window = ["attention.default=infllm", f"attention.infllm.window={128 if quick else KEYS - 512}"]
        blocks = ["attention.infllm.block_size=128", "attention.infllm.topk=3"]
        tasks = ["--attention", "own", "--tasks", "validation_loss,position_wise,needle"]
        evaluations[READ_WITH_INFLLM] = [*window, *blocks, *tasks]
    added = {needle_corpus(seq_len): SHARE}
    return Arm(f"{name}-{length}", seed, content, evaluations, added, package=_package(name))


def _timed_arm(name: str, length: str, seq_len: int, seed: int, quick: bool) -> Arm:
    """Some steps of the same model at full length, where a gate that is learned selects already."""
    batch = 2048 if quick else batch_tokens(seq_len)
    tokens = (2 if quick else TIMED_STEPS) * batch
    size = "small" if quick else SIZE
    stages = [{"name": "timed", "seq_len": seq_len, "tokens": tokens, "evaluate": False}]
    content = recipe(size, _section(MECHANISMS[name], quick), seq_len, tokens, batch, {}, stages=stages)
    return Arm(f"{TIMED}{name}-{length}", seed, content, package=_package(name), is_timed=True)


def _section(mechanism: Mechanism, quick: bool) -> dict[str, Any]:
    """`attention` of a recipe."""
    options = {**mechanism.options, **(mechanism.quick if quick else {})}
    return {"default": mechanism.kind} | ({mechanism.kind: options} if options else {})


def _package(name: str) -> str:
    """The module that a kind needs."""
    return "fla" if name == "kda" else ""


def _is_timed(result: Result) -> bool:
    return bool(result["name"].startswith(TIMED))


def _distilled_stages(kind: str, size: str, stage: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Full attention, the gate alone, and the model with what the gate selects; each with a schedule of its own."""
    rate = learning_rate(size)
    tokens = {name: int(share * stage["tokens"]) for name, share in _GATE_TRAINING.items()}
    first = {**stage, "tokens": stage["tokens"] - sum(tokens.values()), "lr": rate, "attention": dict(FULL)}
    warmup = {
        **stage,
        "name": "warmup",
        "tokens": tokens["warmup"],
        "lr": 1e-3,
        "attention": {kind: {"mode": "warmup"}},
    }
    gate = {"trainable": [f"*.attention.{kind}.*"], "schedule": {"kind": "cosine"}}
    schedule = {"kind": "cosine", "warmup_tokens": first["tokens"] // 50}
    sparse = {**stage, "name": "sparse", "tokens": tokens["sparse"], "lr": rate / 10, "schedule": {"kind": "cosine"}}
    return [{**first, "schedule": schedule}, {**warmup, **gate}, sparse]


def _mechanism_and_length(name: str) -> tuple[str, str]:
    mechanism, _, length = name.rpartition("-")
    return mechanism, length


def _evaluation_error(result: Result, same_length: Sequence[Result]) -> float | None:
    """Half the interval, of evaluation alone, of the distance from full attention with the same seed; None where it is
    not known, and for full attention itself."""
    arm, _ = _mechanism_and_length(result["name"])
    two = [one for one in same_length if _mechanism_and_length(one["name"])[0] in (arm, "full")]
    comparison = compare(_cells([one for one in two if one["seed"] == result["seed"]]))
    from_full = {arm: 1.0, "full": -1.0}
    return comparison.contrast(from_full).evaluation if arm != "full" and comparison.knows(from_full) else None


def _mean(results: Sequence[Result], value: Any) -> float:
    return statistics.mean(map(value, results))


def _added_parameters(result: Result, results: Sequence[Result]) -> int | None:
    """Parameters beyond those of full attention; None while that arm is missing."""
    length = _mechanism_and_length(result["name"])[1]
    full = next((other for other in results if other["name"] == f"full-{length}"), None)
    return None if full is None else int(result["parameters"] - full["parameters"])


def _infllm_rows(full: Sequence[Result]) -> list[list[str]]:
    """What `infllm` reads with full attention's weights."""
    read = [(result, result["evaluations"][READ_WITH_INFLLM]) for result in full if result["evaluations"]]
    if not read:
        return []
    name = f"infllm-{_mechanism_and_length(full[0]['name'])[1]}, weights of full"
    names = ("eval_loss", "trailing_loss", "needle")
    means = {key: statistics.mean(found["numbers"][key] for _, found in read) for key in names}
    cells = [
        Cell(
            READ_WITH_INFLLM,
            _block(result),
            found["numbers"]["trailing_loss"],
            own_trailing_by_sequence(found["position_wise"]),
            found["position_wise"].get("documents", ()),
        )
        for result, found in read
    ]
    losses = [f"{means['eval_loss']:.4f}", f"{means['trailing_loss']:.4f}"]
    losses += above([*_cells(full), *cells], READ_WITH_INFLLM, "full")
    return [[name, "–", *losses, f"{means['needle']:.2f}", "–", "–", "0", str(len(read))]]


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Whether each kind reaches full attention, judged within a length, as what kinds lose differs between lengths.

    Lengths with one seed have no verdicts.
    """
    found = []
    for length in dict.fromkeys(_mechanism_and_length(result["name"])[1] for result in results):
        own = [result for result in results if _mechanism_and_length(result["name"])[1] == length]
        comparison = compare(_cells(own))
        if not comparison.freedom:
            continue
        at = f"At {length.upper()}"
        for name in comparison.arms:
            if name != "full":
                claim = f"{at} `{name}` is within 0.01 of full attention's trailing loss"
                found += comparison.judge(claim, {name: 1.0, "full": -1.0}, -0.01, 0.01)
        claim = f"{at} `key_conv: 3` improves MoBA's trailing loss"
        found += comparison.judge(claim, {"moba-128-conv": 1.0, "moba-128": -1.0}, -math.inf, 0.0)
    return found


def _cells(results: Sequence[Result]) -> list[Cell]:
    """Trailing losses by mechanism."""
    return [
        Cell(
            _mechanism_and_length(result["name"])[0],
            _block(result),
            trailing_loss(result),
            trailing_by_sequence(result),
            trailing_documents(result),
        )
        for result in results
    ]


def _block(result: Result) -> str:
    return f"{_mechanism_and_length(result['name'])[1]}, seed {result['seed']}"
