"""Whether what other packages have, and this one can do without, can be imported."""

from collections.abc import Iterable
from importlib import import_module


def import_problem(features: Iterable[tuple[str, str]]) -> str:
    """Why one of these (module, attribute) pairs cannot be imported, on one line with the kind of error; empty when all
    can. Every module is imported, and every attribute looked up."""
    for module, attribute in features:
        try:
            getattr(import_module(module), attribute)
        except Exception as error:  # a broken build raises anything: ImportError, OSError, RuntimeError, ...
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""
