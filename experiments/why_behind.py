"""F14: why MoBA is behind full attention in these models: long documents, no local context, or too few gates.

Moonshot's batches at 8K are mostly short documents, in which MoBA is full attention; here every sample lies in one long
document. The same text is therefore read in documents of at most 1K tokens, and 80 % so. Windows have the keys that
MoBA attends to on average in a sequence of 8K: 3 blocks of 512 are 1,280 keys, 12 of 128 are 1,472.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from benchmarks.plotting import GREEN, INK, MOBA, spread
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.corpus import Corpus, write_short
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, batch_tokens, moba, recipe
from experiments.readings import (
    keys_text,
    trailing_by_sequence,
    trailing_documents,
    trailing_loss,
    validation_by_sequence,
    validation_loss,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SIZE = "10m"
TOKENS = 100_000_000
SEQ_LEN = 8192
SHORT_DOCUMENT = 1024
"""Tokens of a document that MoBA 512/3 attends to completely."""
SHORT_TEXT = "short-documents"
SHORT_VALIDATION = "short-documents-valid"


class Setting(NamedTuple):
    """Arms of one setting, which are compared with its full attention."""

    attention: Mapping[str, Mapping[str, Any]]
    """Arms: the section `attention`."""
    model: Mapping[str, Any] = {}
    """Keys of the model that differ."""
    short: float = 0.0
    """Share of the tokens in short documents."""


def _window(tokens: int) -> dict[str, Any]:
    return {"default": "window", "window": {"window": tokens}}


def _full_and(**attention: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {"full": FULL, **attention}


_MOBA = moba(512, 3)
SETTINGS: dict[str, Setting] = {
    "long": Setting(
        _full_and(
            moba=_MOBA,
            previous=moba(512, 3, always=["current", "previous"]),
            blocks128=moba(128, 12),
            window1280=_window(1280),
            window1472=_window(1472),
        )
    ),
    "short": Setting(_full_and(moba=_MOBA), short=1.0),
    "mixed": Setting(_full_and(moba=_MOBA), short=0.8),
    "heads3": Setting(_full_and(moba=_MOBA), {"heads": 3, "kv_heads": 3}),
    "heads6": Setting(_full_and(moba=_MOBA), {"heads": 6, "kv_heads": 6}),
    "heads12": Setting(_full_and(moba=_MOBA), {"heads": 12, "kv_heads": 12}),
}
_SMALL = moba(64, 3)
QUICK: dict[str, Setting] = {
    "long": Setting(_full_and(moba=_SMALL, window1280=_window(160))),
    "mixed": Setting(_full_and(moba=_SMALL), short=0.8),
    "heads3": Setting(_full_and(moba=_SMALL), {"heads": 1, "kv_heads": 1}),
}
QUICK_SEQ_LEN = 1024


class WhyBehind(Figure):
    """Reasons for the gap between MoBA and full attention: long documents, no local context, or too few gates."""

    name = "why-behind"
    title = "F14. Why MoBA is behind here"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Setting by setting, full attention first."""
        return [
            build_arm(f"{setting}-{arm}", seed, which, attention, quick)
            for setting, which in (QUICK if quick else SETTINGS).items()
            for arm, attention in which.attention.items()
        ]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """The training and the validation text in documents of at most `SHORT_DOCUMENT` tokens."""
        most = SHORT_DOCUMENT // 8 if quick else SHORT_DOCUMENT
        for source, name in (("train", SHORT_TEXT), ("valid", SHORT_VALIDATION)):
            write_short(corpus, source, folder / name, most)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses of each arm, and their distance from the full attention of its setting."""
        rows = [["setting", "arm", "mean keys", "validation loss", *ABOVE, "trailing loss", *ABOVE, "seeds"]]
        for setting, arm in dict.fromkeys(map(_setting_and_arm, results)):
            own = [result for result in results if _setting_and_arm(result) == (setting, arm)]
            row = [setting, arm, keys_text(own[0])]
            for value, cells in (
                (validation_loss, _losses(results, setting)),
                (_trailing, trailing_cells(results, setting)),
            ):
                known = [value(result) for result in own]
                row += [f"{statistics.mean(known):.4f}" if math.isfinite(known[0]) else "–", *above(cells, arm, "full")]
            rows.append([*row, str(len(own))])
        return Finding(_verdicts(results), rows)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """The validation loss above full attention's in the same setting: means, and bands over seeds."""
        axes = canvas.subplots()
        full = {(_setting_and_arm(one)[0], one["seed"]): validation_loss(one) for one in results if _is_full(one)}
        gaps: dict[str, list[float]] = {}
        for result in results:
            setting, _ = _setting_and_arm(result)
            base = full.get((setting, result["seed"]))
            if not _is_full(result) and base is not None:
                gaps.setdefault(result["name"], []).append(validation_loss(result) - base)
        for place, (name, values) in enumerate(gaps.items()):
            colour = GREEN if "window" in name else MOBA
            spread(axes, values, place, colour)
        axes.set_yticks(range(len(gaps)), list(gaps))
        axes.invert_yaxis()
        axes.axvline(0, color=INK, lw=0.8)
        axes.set_xlabel("validation loss above full attention in the same setting, nats")


def build_arm(name: str, seed: int, setting: Setting, attention: Mapping[str, Any], quick: bool) -> Arm:
    """An arm `SETTING-NAME` with this attention."""
    seq_len, tokens, batch = (QUICK_SEQ_LEN, 4096, 2048) if quick else (SEQ_LEN, TOKENS, batch_tokens(SEQ_LEN))
    evaluation: dict[str, Any] = {"sequences": 2 if quick else 256}
    if not setting.short:  # samples inside one document
        bucket, sequences = (256, 2) if quick else (1024, 128)
        evaluation["position_wise"] = {"bucket": bucket, "sequences": sequences, "attention": "own"}
    content = recipe("small" if quick else SIZE, attention, seq_len, tokens, batch, evaluation)
    content["model"] |= setting.model
    if setting.short:
        content["data"] = {
            "train": _blend(setting.short, SHORT_TEXT, "train"),
            "validation": _blend(setting.short, SHORT_VALIDATION, "valid"),
        }
    return Arm(name, seed, content)


def _blend(share: float, short: str, whole: str) -> list[dict[str, Any]]:
    sources = [{"path": short, "weight": share}, {"path": whole, "weight": round(1 - share, 3)}]
    return [source for source in sources if source["weight"]]


def _setting_and_arm(result: Result) -> tuple[str, str]:
    setting, _, arm = result["name"].partition("-")
    return setting, arm


def _is_full(result: Result) -> bool:
    return _setting_and_arm(result)[1] == "full"


def _trailing(result: Result) -> float:
    """Trailing loss; NaN in settings of short documents, which have none."""
    return trailing_loss(result) if "position_wise" in result["stages"]["train"] else math.nan


def _block(result: Result) -> str:
    return f"seed {result['seed']}"


def _losses(results: Sequence[Result], setting: str) -> list[Cell]:
    own = [result for result in results if _setting_and_arm(result)[0] == setting]
    return [
        Cell(_setting_and_arm(one)[1], _block(one), validation_loss(one), validation_by_sequence(one)) for one in own
    ]


def trailing_cells(results: Sequence[Result], setting: str) -> list[Cell]:
    """Trailing losses of the arms of a setting, by their names in it."""
    own = [result for result in results if _setting_and_arm(result)[0] == setting and math.isfinite(_trailing(result))]
    return [
        Cell(
            _setting_and_arm(one)[1],
            _block(one),
            trailing_loss(one),
            trailing_by_sequence(one),
            trailing_documents(one),
        )
        for one in own
    ]


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained."""
    found = []
    gap = {"moba": 1.0, "full": -1.0}
    for setting, within, words in (("short", 0.005, "of at most 1K tokens"), ("mixed", 0.02, "80 % of them so short")):
        claim = f"In documents {words}, MoBA 512/3's validation loss is within {within} of full attention's"
        found += compare(_losses(results, setting)).judge(claim, gap, -within, within)
    long = compare(trailing_cells(results, "long"))
    for ours, theirs, words in (
        ("moba", "window1280", "MoBA 512/3 has a lower trailing loss than a window of as many keys"),
        ("blocks128", "window1472", "MoBA 128/12 has a lower trailing loss than a window of as many keys"),
        ("previous", "moba", "The previous block lowers MoBA 512/3's trailing loss"),
    ):
        found += long.judge(words, {ours: 1.0, theirs: -1.0}, -math.inf, 0.0)
    heads = compare([cell for name in ("heads3", "heads12") for cell in _gaps(results, name)])
    claim = "With 12 heads of 32, MoBA's gap is at least 0.01 smaller than with 3 heads of 128"
    return found + heads.judge(claim, {"heads12": 1.0, "heads3": -1.0}, -math.inf, -0.01)


def _gaps(results: Sequence[Result], setting: str) -> list[Cell]:
    """MoBA's trailing loss above full attention's, for each seed that has both."""
    losses = {(cell.arm, cell.block): cell.value for cell in trailing_cells(results, setting)}
    return [
        Cell(setting, block, loss - losses["full", block])
        for (arm, block), loss in losses.items()
        if arm == "moba" and ("full", block) in losses
    ]
