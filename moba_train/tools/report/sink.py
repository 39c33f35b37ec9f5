"""The report of a run as a telemetry sink."""

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from moba_train.telemetry.telemetry import Record, SinkRun

logger = logging.getLogger(__name__)

INSTALL = "pip install 'plotly>=6'"


class ReportSink:
    """Writes `report.html` (`telemetry.report`) when a run ends in order. A `Sink`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @classmethod
    def problem(cls, setting: Literal["auto"] | bool) -> str:
        """Reason why the report that the recipe asks for cannot be written here, with the remedy; empty: it can."""
        if setting is not True or plotly_is_installed():
            return ""
        return f"given true, but the package plotly is not installed; {INSTALL}, or set auto"

    @classmethod
    def describe(cls, setting: Literal["auto"] | bool) -> str:
        """Words about the report for the run's first lines."""
        return "report.html at the end" if plotly_is_installed() else f"no report.html without plotly: {INSTALL}"

    @classmethod
    def open(cls, setting: Literal["auto"] | bool, run: SinkRun) -> "ReportSink":
        """The sink of a run."""
        return cls(run.folder)

    def write(self, record: Record) -> None:
        """Does nothing: the report is made from metrics.jsonl."""

    def close(self) -> None:
        """Write the report, unless an error ends the run. A failure is only a warning: the run is complete."""
        if sys.exc_info()[0] is not None or not plotly_is_installed():
            return
        try:
            from moba_train.tools.report.page import write_report  # plotly takes a second to import

            write_report([self._run_dir])
        except Exception as error:
            logger.warning("the report of the run could not be written: %s", error)


def plotly_is_installed() -> bool:
    """True if the package that draws the pages can be found."""
    return find_spec("plotly") is not None
