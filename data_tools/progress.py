"""Progress of a long command: a bar in a terminal, a line now and then in a log."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class TokenProgress:
    """Counts input bytes towards a total, and the tokens made of them. `done` bytes were finished by an earlier run."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._earlier = self._done = done
        self._tokens = 0
        self._begin = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("tokenize"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("tokenize", total=total, completed=done, rate="")

    def advance(self, size: int, tokens: int) -> None:
        """`size` more bytes are done and gave `tokens` tokens."""
        self._done += size
        self._tokens += tokens
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rate = f"{self._tokens / 1e6:.2f}M tokens, {self._tokens / seconds / 1e6:.2f}M tokens/s"
        self._bar.update(self._task, completed=self._done, rate=rate)
        if self._bar.disable and (now - self._printed > SECONDS_BETWEEN_LINES or self._done == self._total):
            self._printed = now
            left = (self._total - self._done) * seconds / max(self._done - self._earlier, 1)
            print(f"tokenize: {self._done / self._total:.0%}, {rate}, {left:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self) -> "TokenProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
