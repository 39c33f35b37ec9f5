"""Text for people in which nothing commands the terminal.

Names of files, messages and recipes may come from elsewhere. A terminal obeys the escape sequences in them: it clears
itself, changes its title, or answers as if somebody had typed. And a name in another encoding cannot be printed at all.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
# Control characters except the end of a line and tabs, those that turn the direction of text, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, colours: bool = False) -> str:
    """`text` with control characters as escapes, such as `\\x1b`; with `colours`, those that set a colour stay."""
    parts = _COLOURS.split(text) if colours else [text]
    parts[::2] = [_UNSAFE.sub(lambda found: ascii(found[0])[1:-1], part) for part in parts[::2]]
    return "".join(parts)


class _VisibleStream:
    """A stream that writes `visible` text: colours, our own or others', reach a terminal only."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> Any:
        """Writes text."""
        return self.stream.write(visible(text, self.stream.isatty()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_terminal() -> Iterator[None]:
    """Inside, all that is printed is `visible`. A stream that was closed stays None, which `print` leaves alone."""
    out: Any = sys.stdout and _VisibleStream(sys.stdout)
    err: Any = sys.stderr and _VisibleStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield
