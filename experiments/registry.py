"""The figures there are. A new one is its own file and one line here."""

from experiments.conversion import Conversion
from experiments.equal_time import EqualTime, EqualTimeRates
from experiments.extrapolation import Extrapolation
from experiments.figure import Figure
from experiments.forced_choices import ForcedChoices
from experiments.granularity import Granularity
from experiments.hybrid import Hybrid
from experiments.inference_gap import InferenceGap
from experiments.long_stage import LongStage
from experiments.mechanisms import Mechanisms
from experiments.needles import Needles
from experiments.scaling import Scaling
from experiments.settings import Settings
from experiments.short_first import ShortFirst
from experiments.third_cliff import ThirdCliff, ThirdCliffSmallerBlocks
from experiments.third_cliff_lengths import ThirdCliffLengths
from experiments.trailing import Position, Trailing
from experiments.trained_with import TrainedWith
from experiments.versions import Versions
from experiments.why_behind import WhyBehind
from experiments.with_experts import WithExperts
from experiments.with_window import WithWindow

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Settings(),
        Scaling(),
        Trailing(),
        Position(),
        Granularity(),
        Hybrid(),
        ThirdCliff(),
        ThirdCliffSmallerBlocks(),
        ShortFirst(),
        Versions(),
        TrainedWith(),
        Mechanisms(),
        Needles(),
        ForcedChoices(),
        EqualTimeRates(),
        EqualTime(),
        Conversion(),
        WhyBehind(),
        InferenceGap(),
        LongStage(),
        Extrapolation(),
        WithWindow(),
        WithExperts(),
        ThirdCliffLengths(),
    )
}


def trained(figure: Figure) -> Figure:
    """The figure whose arms and result file this one shows: its own, or its `source`'s."""
    return FIGURES[figure.source] if figure.source else figure
