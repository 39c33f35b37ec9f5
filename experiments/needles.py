"""F11: why MoBA finds needles: its gate's misses beside those that FlashMoBA's signal-to-noise model predicts."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmarks.needle_signal import by_gate, draw_signal, retrieving, summary
from benchmarks.plotting import INK
from benchmarks.plotting import name as write_name
from experiments.comparison import Estimate, Verdict, mean_of
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.mechanisms import SIZE, TOKENS, shape
from experiments.models import FULL, moba, recipe
from experiments.needle_documents import SHARE, needle_corpus, write_needles
from experiments.readings import needle, needle_in_history

SEQ_LEN = 8192
QUICK_SEQ_LEN = 1024
GATES = ((32, 48), (64, 24), (128, 12), (256, 6), (512, 3))
"""Block size and topk: 1,536 keys each."""
QUICK_GATES = ((16, 12), (64, 3))
SIGNAL = "signal"
"""Name of the evaluation."""
_ARMS = {"full": FULL, "moba-512": moba(512, 3), "moba-128": moba(128, 12), "moba-128-conv": moba(128, 12, key_conv=3)}
_QUICK_ARMS = {"full": FULL, "moba-64": moba(64, 3)}


class Needles(Figure):
    """Misses of MoBA's gate, head by head, beside those of the signal-to-noise model; mass recall and margin."""

    name = "needles"
    title = "F11. Why MoBA finds needles"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Full attention first: all gates are asked of the same queries and keys."""
        kinds = _QUICK_ARMS if quick else _ARMS
        return [_arm(name, section, seed, quick) for name, section in kinds.items()]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """The documents with hidden numbers."""
        length, tokens = (QUICK_SEQ_LEN, 1 << 15) if quick else (SEQ_LEN, int(SHARE * TOKENS))
        write_needles(corpus, folder, length, tokens)

    def find(self, results: Sequence[Result]) -> Finding:
        """For each arm and gate, misses as observed and as predicted; for each arm what its gates select."""
        heads = ["heads", "chance", "missed", "paper", "spread", "cluster", "scores", "needle", "in history"]
        rows = [["arm, gate", *heads, "mass recall, margin"]]
        numbers = {}
        for name in dict.fromkeys(result["name"] for result in results):
            own = [result for result in results if result["name"] == name]
            lines = summary([row for result in own for row in signal_rows(result)])
            numbers[name] = lines
            found = [f"{statistics.mean(map(share, own)):.2f}" for share in (needle, needle_in_history)]
            chance = chances(own)
            for line in lines:
                gate = f"{name}, {line['block_size']}/{line['topk']}, {line['which']}"
                predicted = [f"{line[f'missed_{model}']:.3f}" for model in ("paper", "spread", "cluster", "scores")]
                blind = f"{chance[line['block_size'], line['topk']]:.3f}"
                missed = f"{line['missed']:.3f}"
                rows.append([gate, str(line["heads"]), blind, missed, *predicted, *found, _probe_text(own)])
        return Finding(_verdicts(results), rows, {"summary": numbers})

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Heads of the full model under the formula and under `scores`; misses over block sizes."""
        arm = "full" if any(result["name"] == "full" for result in results) else next(iter(results))["name"]
        rows = [row for result in results if result["name"] == arm for row in signal_rows(result)]
        draw_signal(canvas, rows, summary(rows))
        misses = canvas.axes[-1]
        blind = {size: chance for (size, _), chance in sorted(chances(results).items())}
        misses.plot(list(blind), list(blind.values()), ":", color=INK)
        write_name(misses, "chance", min(blind.items()), INK, (1, -6))


def signal_rows(result: Result) -> list[dict[str, Any]]:
    """A row for each layer, head and gate, of the attention that the arm was trained with."""
    found = result["evaluations"][SIGNAL]["needle_signal"]
    (rows,) = found["rows"][found["attention"]].values()
    return list(rows)


def chances(results: Sequence[Result]) -> dict[tuple[int, int], float]:
    """Share of the needles that a gate would miss which selects blocks blindly, by block size and topk."""
    gates = by_gate([row for result in results for row in signal_rows(result)])
    return {
        (size, topk): 1 - statistics.mean((topk - 1) / (row["other_blocks"] + 1) for row in rows)
        for (size, topk), rows in gates.items()
    }


def _arm(name: str, section: dict[str, Any], seed: int, quick: bool) -> Arm:
    seq_len, size = (QUICK_SEQ_LEN, "small") if quick else (SEQ_LEN, SIZE)
    content = recipe(size, section, *shape(seq_len, TOKENS, quick))
    gates = ", ".join(f"{{block_size: {size}, topk: {topk}}}" for size, topk in (QUICK_GATES if quick else GATES))
    depths, samples = ("[0, 50]", 1) if quick else ("[0, 25, 50, 75, 90]", 8)
    signal = [
        f"evaluation.needle_signal.gates=[{gates}]",
        f"evaluation.needle_signal.lengths=[{seq_len}]",
        f"evaluation.needle_signal.depths={depths}",
        f"evaluation.needle_signal.samples={samples}",
    ]
    if section is FULL:
        tasks = ["--attention", "full", "--tasks", "needle_signal"]
    else:
        probe = [f"evaluation.gate_probe.sequences={1 if quick else 8}"]
        tasks = ["--attention", "own", "--tasks", "needle_signal,gate_probe", *probe]
    return Arm(name, seed, content, {SIGNAL: [*tasks, *signal]}, added={needle_corpus(seq_len): SHARE})


def _probe_text(results: Sequence[Result]) -> str:
    """Means over layers and seeds of what the gate probe found; empty for full attention."""
    layers = [
        layer for result in results for layer in result["evaluations"][SIGNAL].get("gate_probe", {}).get("layers", [])
    ]
    if not layers:
        return "–"
    recall, margin = (statistics.mean(layer[key] for layer in layers) for key in ("mass_recall", "margin"))
    return f"{recall:.3f}, {margin:.3f}"


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Means over models of means over their heads that retrieve: heads of one model are not independent. Gates of one
    head are averaged, because they see the same keys."""
    models: dict[tuple[str, int], dict[tuple[int, int], list[dict[str, Any]]]] = {}
    for result in results:
        for row in retrieving(signal_rows(result)):
            heads = models.setdefault((result["name"], result["seed"]), {})
            heads.setdefault((row["layer"], row["head"]), []).append(dict(row))
    if len(models) < 2:
        return []

    def over_models(of_head: Callable[[list[dict[str, Any]]], float]) -> Estimate:
        return mean_of([statistics.mean(map(of_head, heads.values())) for heads in models.values()])

    def error(predicted: str, rows: list[dict[str, Any]]) -> float:
        return statistics.mean(row[f"outranked_{predicted}"] - row["outranked"] for row in rows)

    def coarsest_less_finest(rows: list[dict[str, Any]]) -> float:
        gates = by_gate(rows)
        finest, coarsest = (statistics.mean(row["missed"] for row in gates[gate]) for gate in (min(gates), max(gates)))
        return coarsest - finest

    found = []
    for predicted, what in (("paper", "The formula"), ("scores", "A normal distribution of the scores as measured")):
        claim = f"{what} predicts within 0.05 how often another block is scored higher, mean over heads that retrieve"
        found.append(Verdict(claim, over_models(partial(error, predicted)), -0.05, 0.05))
    claim = "The coarsest gate misses more needles than the finest, at an equal number of keys"
    found.append(Verdict(claim, over_models(coarsest_less_finest), 0.0, math.inf))
    return found
