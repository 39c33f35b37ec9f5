"""The plots of a run as a telemetry sink."""

import logging
import sys
from pathlib import Path

from moba_train.telemetry.telemetry import Record, SinkRun

logger = logging.getLogger(__name__)


class PlotsSink:
    """The plots of a run (`telemetry.plots: true`), drawn when it ends in order. A `Sink`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @classmethod
    def open(cls, setting: bool, run: SinkRun) -> "PlotsSink":
        """The sink of a run."""
        return cls(run.folder)

    def write(self, record: Record) -> None:
        """Nothing: plots are drawn from metrics.jsonl."""

    def close(self) -> None:
        """Draw, unless an error ends the run. A failure is only a warning: the run is complete."""
        if sys.exc_info()[0] is not None:
            return
        try:
            from moba_train.tools.report.plots import plot_needle, plot_position_wise, plot_run  # matplotlib is slow

            plot_run(self._run_dir)
            plot_position_wise(self._run_dir)
            plot_needle(self._run_dir)
        except Exception as error:
            logger.warning("the plots of the run could not be drawn: %s", error)
