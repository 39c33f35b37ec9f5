"""The plots of a run, drawn when it ends."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def draw_plots(run_dir: Path) -> None:
    """Draw the loss, and the loss by position and the needle maps where they were evaluated. A failure is only a
    warning: the run is complete.

    matplotlib is imported here, because its import takes a quarter of the time of a restart.
    """
    try:
        from moba_train.report.loss_plot import plot_run
        from moba_train.report.needle_plot import plot_needle
        from moba_train.report.position_plot import plot_position_wise

        plot_run(run_dir)
        plot_position_wise(run_dir)
        plot_needle(run_dir)
    except Exception as error:
        logger.warning("the plots of the run could not be drawn: %s", error)
