"""Text for people in which nothing commands the terminal.

Names of files, messages and recipes may come from elsewhere. A terminal obeys the escape sequences in them: it clears
itself, changes its title, or answers as if somebody had typed. And a name in another encoding cannot be printed at all.
Nor does a reader that ends, or a full disk, end the program whose text it takes. Imports nothing heavy.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

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


class _DroppingFile(io.FileIO):
    """A file that takes everything: what cannot be written is lost, without an error."""

    def write(self, data: "Buffer") -> int:
        with suppress(OSError):
            if written := super().write(data):
                return written
        return memoryview(data).nbytes


def outlast_output() -> None:
    """Let the process go on when what it prints is not read, or the disk that takes it is full.

    Called before the program opens files: the first would get the number of a closed stream, and be written to by
    libraries that print.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    for number, name in ((1, "stdout"), (2, "stderr")):
        visible = getattr(sys, name)
        holder: Any = visible if isinstance(visible, _VisibleStream) else sys
        held = "stream" if holder is visible else name
        stream = getattr(holder, held)
        if stream is getattr(sys, f"__{name}__"):  # else a caller in this process captures it
            file = io.BufferedWriter(_DroppingFile(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            # A name that is not UTF-8 must not end a run either.
            setattr(holder, held, io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True))
