"""F12: blocks that are always selected, one selection for a group of heads, and how far each head looks by itself."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import INK, MOBA, spread
from experiments.comparison import Cell, Verdict, compare, mean_of
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.mechanisms import SIZE, TOKENS, shape
from experiments.models import moba, recipe
from experiments.needle_documents import SHARE, needle_corpus, write_needles
from experiments.readings import last_stage, needle, trailing_loss, validation_loss

SEQ_LEN = 8192
QUICK_SEQ_LEN = 1024
BLOCKS = (128, 4)
"""Block size and topk: with two forced blocks besides the own one there is one choice left."""
QUICK_BLOCKS = (32, 4)
CHOICES: dict[str, dict[str, Any]] = {
    "free": {},
    "previous": {"always": ["current", "previous"]},
    "group": {"select": "group"},
    "first": {"always": ["current", "first"]},
    "previous-first": {"always": ["current", "previous", "first"]},
}
QUICK = ("free", "previous", "group")
PROBE = "gate_probe"


class ForcedChoices(Figure):
    """`always: previous` and `first`, `select: group`, and the distances that each head selects by itself."""

    name = "forced"
    title = "F12. Forced choices"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The gate's own choice first."""
        seq_len, (block_size, topk) = (QUICK_SEQ_LEN, QUICK_BLOCKS) if quick else (SEQ_LEN, BLOCKS)
        found = []
        for name in QUICK if quick else CHOICES:
            section = moba(block_size, topk, **CHOICES[name])
            content = recipe("small" if quick else SIZE, section, *shape(seq_len, TOKENS, quick))
            probe = {"queries": 64, "sequences": 1} if quick else {"queries": 256, "sequences": 8}
            content["evaluation"] = {**content["evaluation"], PROBE: {**probe, "by_head": True}}
            found.append(Arm(name, seed, content, added={needle_corpus(seq_len): SHARE}))
        return found

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """The documents with hidden numbers."""
        length, tokens = (QUICK_SEQ_LEN, 1 << 15) if quick else (SEQ_LEN, int(SHARE * TOKENS))
        write_needles(corpus, folder, length, tokens)

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses, needles and mass recall of each choice, and how much heads differ."""
        rows = [["", "validation loss", "trailing loss", "needle", "mass recall", "taste, bits", "seeds"]]
        for name in dict.fromkeys(result["name"] for result in results):
            own = [result for result in results if result["name"] == name]
            values = [statistics.mean(map(value, own)) for value in (validation_loss, trailing_loss)]
            recall = statistics.mean(_probe(result)["mass_recall"] for result in own)
            taste = statistics.mean(bits for result in own for bits in tastes(result))
            cells = [f"{statistics.mean(map(needle, own)):.2f}", f"{recall:.3f}", f"{taste:.3f}", str(len(own))]
            rows.append([name, *(f"{value:.4f}" for value in values), *cells])
        return Finding(_verdicts(results), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Trailing loss above the free choice; where each head of the free choice looks, layer by layer."""
        left, right = canvas.subplots(1, 2, width_ratios=(1, 2))
        free = {result["seed"]: trailing_loss(result) for result in results if result["name"] == "free"}
        names = list(dict.fromkeys(result["name"] for result in results))
        for place, name in enumerate(names):
            own = [result for result in results if result["name"] == name and result["seed"] in free]
            if own:
                spread(left, [trailing_loss(result) - free[result["seed"]] for result in own], place, MOBA)
        left.set_yticks(range(len(names)), names)
        left.axvline(0, color=INK, lw=0.8)
        left.set_xlabel("trailing loss above free, nats")
        shown = next((result for result in results if result["name"] == "free"), None)
        if shown is None:
            return
        shares_RX = np.concatenate([_shares(layer) for layer in _layers(shown)])
        used = int(np.flatnonzero(shares_RX.sum(0)).max()) + 1
        heads = len(shares_RX) // len(_layers(shown))
        image = right.imshow(shares_RX[:, :used], aspect="auto", vmin=0)
        right.grid(visible=False)
        layers = [f"layer {layer['layer']}" for layer in _layers(shown)]
        right.set_yticks(np.arange(len(layers)) * heads, layers)
        right.set_xticks(range(used), _probe(shown)[PROBE]["distances"][:used])
        right.set_xlabel("distance of the blocks that a head selects, in blocks")
        canvas.colorbar(image, ax=right, label="share of its choices")


def tastes(result: Result) -> list[float]:
    """For each layer, how much its heads differ in the distances that they select: Jensen-Shannon divergence, bits."""
    return [divergence(_shares(layer)) for layer in _layers(result)]


def divergence(shares_HX: npt.NDArray[np.float64]) -> float:
    """Jensen-Shannon divergence between distributions, in bits: entropy of their mean less the mean of entropies.
    Distributions of nothing but zeros do not count."""
    used_HX = shares_HX[shares_HX.sum(1) > 0]
    return _entropy(used_HX.mean(0)) - float(np.mean([_entropy(row) for row in used_HX])) if len(used_HX) else 0.0


def _entropy(shares_X: npt.NDArray[np.float64]) -> float:
    some = shares_X[shares_X > 0]
    return float(-(some * np.log2(some)).sum())


def _probe(result: Result) -> dict[str, Any]:
    probe: dict[str, Any] = last_stage(result)[PROBE]
    return probe


def _layers(result: Result) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = _probe(result)[PROBE]["layers"]
    return layers


def _shares(layer: dict[str, Any]) -> npt.NDArray[np.float64]:
    return np.array(layer["head_distance_share"], dtype=np.float64)


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    found = []
    comparison = compare([Cell(one["name"], f"seed {one['seed']}", trailing_loss(one)) for one in results])
    for name in comparison.arms:
        if name != "free":
            claim = f"`{name}` changes the trailing loss by less than 0.005"
            found += comparison.judge(claim, {name: 1.0, "free": -1.0}, -0.005, 0.005)
    # Layers of one model are not independent, so a seed counts once.
    bits = [statistics.mean(tastes(result)) for result in results if result["name"] == "free"]
    if len(bits) > 1:
        claim = "Heads of one layer differ in the distances that they select by 0.05 bits or more"
        found.append(Verdict(claim, mean_of(bits), 0.05, float("inf")))
    return found
