"""Progress of a long command: a bar in a terminal, a line every few seconds in a log."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Counts bytes towards `total`, and tokens if there are any. `done` bytes were finished by an earlier run."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what = what
        self._total = total
        self._earlier = done
        self._done = done
        self._tokens = 0
        self._begin = time.monotonic()
        self._printed = self._begin
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(file=sys.__stderr__),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(what, total=total, completed=done, rate="")

    def advance(self, size: int, tokens: int = 0) -> None:
        """Record `size` more bytes as done, with `tokens` tokens."""
        self._done += size
        self._tokens += tokens
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rate = f"{(self._done - self._earlier) / seconds / 1e6:.1f} MB/s"
        if self._tokens:
            rate = f"{self._tokens / 1e6:.2f}M tokens, {self._tokens / seconds / 1e6:.2f}M tokens/s"
        self._bar.update(self._task, completed=self._done, rate=rate)
        if self._bar.disable and (now - self._printed > SECONDS_BETWEEN_LINES or self._done == self._total):
            self._printed = now
            left = (self._total - self._done) * seconds / max(self._done - self._earlier, 1)
            print(
                f"{self._what}: {self._done / self._total:.0%}, {rate}, {left:.0f} s left", file=sys.stderr, flush=True
            )

    def __enter__(self) -> "ByteProgress":
        self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
