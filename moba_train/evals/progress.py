"""Progress of an evaluation in a terminal."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import track


def tracked(items: Sequence[int], what: str) -> Iterable[int]:
    """The items, with a bar on stderr that goes when they are done; no bar where stderr is not a terminal."""
    disabled = not sys.stderr.isatty()
    return track(items, what, console=Console(stderr=True), transient=True, disable=disabled)
