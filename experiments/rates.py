"""Measured training rates, by which losses at equal tokens become losses at equal time.

The rates are those of F10's arms that are timed: a model of 10M parameters alone on one H100. Losses of other sizes are
compared by the same ratio, which is theirs only as far as attention takes the same share of a step.
"""

from pathlib import Path

from experiments.models import SHORT_SHARE
from experiments.results import read_results

TIMED = "time-"
"""Begins the names of arms that are trained for their tokens per second alone."""
_FILE = Path(__file__).parent / "results" / "mechanisms.json"


def moba_over_full(seq_len: int) -> float | None:
    """Tokens that MoBA 512/3 trains in the time of each token of full attention; None where rates were not measured.

    Both begin with a share of their tokens at 1K, in which MoBA is full attention: these are taken to train as fast as
    full attention at 8K, the shortest length that was timed.
    """
    rates = {result["name"]: float(result["tokens_per_s"]) for result in read_results(_FILE)}
    names = [f"full-{seq_len // 1024}k", f"moba-{seq_len // 1024}k", "full-8k"]
    full, moba, short = (rates.get(TIMED + name) for name in names)
    if not (full and moba and short):
        return None
    at_1k = SHORT_SHARE / short
    return (at_1k + (1 - SHORT_SHARE) / full) / (at_1k + (1 - SHORT_SHARE) / moba)
