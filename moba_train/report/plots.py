"""The pictures of a run, drawn when it ends."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def draw_pictures(run_dir: Path) -> None:
    """Draw the loss, and the loss by position where it was evaluated. What fails is a warning: the run itself is done.

    matplotlib is imported only now: it is a quarter of the time of a restart.
    """
    try:
        from moba_train.report.loss_plot import plot_run
        from moba_train.report.position_plot import plot_position_wise

        plot_run(run_dir)
        plot_position_wise(run_dir)
    except Exception as error:
        logger.warning("no picture of the loss: %s", error)
