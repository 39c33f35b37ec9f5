"""Draws the pictures of the docs in the style of plotting.py, from result files.

python -m benchmarks.pictures                      # all of them, into docs/images
python -m benchmarks.pictures training attention   # these
python -m benchmarks.pictures smollm2-signal --results runs/smollm2/signal.json --output signal.svg
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import (
    attention_plot,
    context_skew_plot,
    context_timeline,
    diagrams,
    flex_tiles,
    float8_loss,
    long_range_signal,
    needle_maps,
    needle_signal,
    optimizers_curve,
    oracle_split,
    smollm2_evaluate,
    training_plot,
)
from benchmarks.plotting import saved

FOLDER = Path(__file__).parents[1] / "docs" / "images"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Picture:
    """A picture and what it is drawn from."""

    draw: Callable[..., None]
    """Takes the figure, and the content of each result file."""
    height: float
    """Inches."""
    results: tuple[str, ...] = ()
    """Names of result files; none: the picture explains, and shows no measurement."""

    @property
    def files(self) -> list[Path]:
        """The result files."""
        return [RESULTS / f"{name}.json" for name in self.results]


PICTURES = {
    "training": Picture(training_plot.draw, 3.2, training_plot.SHOWN),
    "attention": Picture(attention_plot.draw, 4, ("attention-h200",)),
    "flex-tiles": Picture(flex_tiles.draw, 3.6, ("flex-tiles-cpu",)),
    "context-skew": Picture(context_skew_plot.draw, 3.2, ("context-skew-h200-x2",)),
    "context-timeline": Picture(context_timeline.draw, 4.6, ("context-timeline-h200",)),
    "float8-loss": Picture(float8_loss.draw, 2.8, ("float8-loss-h200",)),
    "float8-loss-continued": Picture(float8_loss.draw, 2.8, ("float8-loss-continued-h200",)),
    "long-range-signal": Picture(long_range_signal.draw, 2.8, ("long-range-signal-h200",)),
    "optimizers-curve": Picture(optimizers_curve.draw, 2.8, ("optimizers-curve-h200",)),
    "selection-split": Picture(oracle_split.draw, 7.5, ("selection-split-h200",)),
    "smollm2-32k": Picture(smollm2_evaluate.draw, 3.2, ("smollm2-32k-h200",)),
    "smollm2-needle": Picture(needle_maps.draw, 2.8, ("smollm2-retrieval-h200",)),
    "smollm2-signal": Picture(needle_signal.draw, 2.8, ("smollm2-signal-cpu",)),
    "moba-kernels": Picture(diagrams.draw_kernels, 4.4),
    "moba-pattern": Picture(diagrams.draw_patterns, 2.7),
    "moba-selection": Picture(diagrams.draw_selection, 3.6),
}


def draw(picture: str, files: Sequence[Path] = (), output: Path | None = None) -> None:
    """Draw one picture, from its own result files and into the docs unless others are given."""
    found = PICTURES[picture]
    texts = [file.read_text() for file in files or found.files]
    with saved(output or FOLDER / f"{picture}.svg", "".join(texts), found.height) as figure:
        found.draw(figure, *map(json.loads, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PICTURES)}")
    parser.add_argument("--results", type=Path, nargs="+", default=(), help="result files instead of the picture's own")
    parser.add_argument("--output", type=Path, help="SVG file instead of the picture in the docs")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in PICTURES]:
        parser.error(f"NAME: given {', '.join(unknown)}; allowed: {', '.join(PICTURES)}")
    if (given.results or given.output) and len(given.names) != 1:
        parser.error(f"--results and --output are for one picture; given {len(given.names)} names")
    for name in given.names or PICTURES:
        draw(name, given.results, given.output)


if __name__ == "__main__":
    main()
