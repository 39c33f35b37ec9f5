"""A sink that fails for a while: what it did not take is counted, and said at most once a minute."""

import logging
import time
from typing import Any

REPORT_SECONDS = 60.0
"""Least time between two reports that the same sink fails."""

logger = logging.getLogger(__name__)


class DelayedError(Exception):
    """Raised by a sink that keeps the records it cannot pass on, and tries again with the next one.

    `pending` records are kept; `lost` records were given up so far, over the whole run, because too many were pending.
    """

    def __init__(self, cause: str, pending: int, lost: int) -> None:
        super().__init__(cause)
        self.pending = pending
        self.lost = lost


class Outage:
    """The failures of one sink, named in the log by its type."""

    def __init__(self, sink: object) -> None:
        self._name = type(sink).__name__
        self._failed = 0  # records that it did not take at once, since the last report that it works
        self._lost = 0  # those of them that it will never have
        self._lost_before = 0  # those of all the time before
        self._given_up = 0  # by the sink itself, `DelayedError.lost`
        self._announced = False  # it has been said that it fails, and not yet that it works
        self._next_report = 0.0

    def failed(self, error: Exception) -> None:
        """Count a record that the sink did not take."""
        self._failed += 1
        if isinstance(error, DelayedError):
            self._lost += error.lost - self._given_up
            self._given_up = error.lost
        else:
            self._lost += 1
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + REPORT_SECONDS
        self._announced = True
        if not isinstance(error, DelayedError):
            logger.warning("%s fails and has missed %d records: %r", self._name, self._lost, error)
            return
        kept = f"{error.pending} records are kept in memory until it works again, {self._lost} are lost"
        logger.warning("%s fails: %s; %s", self._name, error, kept)

    def works(self) -> dict[str, Any] | None:
        """Note that the sink took a record. The content of a warning event if it was said before that it fails.

        A failure too short to be reported is counted in the next report.
        """
        if not self._announced:
            return None
        counts = {"records_late": self._failed - self._lost, "records_lost": self._lost}
        message = f"{self._name} works again: {counts['records_late']} records came late, {self._lost} are lost"
        logger.warning("%s", message)
        self._lost_before += self._lost
        self._failed = 0
        self._lost = 0
        self._announced = False
        return {"message": message, **counts}

    def closed(self, error: Exception | None) -> None:
        """Report what the sink has missed for good; `error` is that of closing it."""
        lost = self._lost_before + self._lost + (error.pending if isinstance(error, DelayedError) else 0)
        missed = f"; it has missed {lost} records in all" if lost else ""
        if error is not None:
            logger.error("%s could not be closed: %s%s", self._name, error, missed)
        elif lost:
            logger.warning("%s is closed%s", self._name, missed)
