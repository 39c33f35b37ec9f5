"""The figures there are. A new one is its own file and one line here."""

from experiments.figure import Figure
from experiments.granularity import Granularity
from experiments.scaling import Scaling
from experiments.trailing import Position, Trailing
from experiments.trained_with import TrainedWith

FIGURES: dict[str, Figure] = {
    figure.name: figure for figure in (Scaling(), Trailing(), Position(), Granularity(), TrainedWith())
}
