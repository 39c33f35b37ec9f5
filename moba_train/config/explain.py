"""The schema in plain words: what a key accepts, and what is wrong with a recipe, with its YAML path."""

import difflib
import re
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from inspect import isclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from moba_train.config.base import Length, OpenSection, Section, TokenBudget

# The validator that reads the suffixes marks the two units.
_UNITS = {get_args(Length)[1]: "(K, M = 1024)", get_args(TokenBudget)[1]: "(K, M, B, T = 1000)"}
_TYPES = {int: "integer", float: "number", str: "text", bool: "true | false", Any: "anything", type(None): "null"}
_BOUNDS: dict[str, tuple[str, Any]] = {"ge": (">=", max), "gt": (">", max), "le": ("<=", min), "lt": ("<", min)}
_PATTERNS = {r"^[A-Za-z0-9._-]+$": "of letters, digits, dots, hyphens and underscores"}

MOST_PROBLEMS = 100
"""Problems that are explained; looking for similar keys takes a millisecond for each."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def given(value: Any) -> str:
    """`value` as text for a message, shortened when it is long; null, true and false as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _short.repr(value)


def format_path(keys: Sequence[int | str]) -> str:
    """A YAML path as users write it: `stages[1].attention.moba`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "the recipe"


def path_keys(path: str) -> list[int | str]:
    """The keys of a YAML path as `format_path` writes it, or with items by number: `stages.1.attention.moba`."""
    return [int(key) if key.isdecimal() else key for key in re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")]


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)` when one of the `known` keys is close to `key`, else an empty string."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_of(name: str, allowed: Sequence[str]) -> str:
    """`name`. Raises ValueError unless it is one of the `allowed` ones."""
    if name not in allowed:
        raise ValueError(f"given {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}")
    return name


def no_credentials(address: str | None) -> str | None:
    """`address`. Raises ValueError, which does not repeat it, if it may hold credentials: recipes are logged."""
    if re.search(r"://.*([?#@]|::)", address or ""):  # fsspec takes a :: for a chain of stores
        raise ValueError(
            "has a `@`, `?`, `#` or `::`; credentials have no place in an address, which is written into logs and "
            "checkpoints: set the variables that the store's package reads, such as AWS_ACCESS_KEY_ID"
        )
    return address


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Description of the values of this type, e.g. `integer >= 1` or `none | abf | pi`."""
    origin, args = get_origin(annotation), get_args(annotation)
    filled = "non-empty " if any(getattr(item, "min_length", None) for item in metadata) else ""
    if origin is Annotated:
        return describe(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " | ".join(describe(arg, metadata if arg is not type(None) else ()) for arg in args)
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if isclass(annotation) and issubclass(annotation, Section):
        return "section"
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        inner = describe(args[0])
        return f"{filled}list of {'sections' if inner == 'section' else inner}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(describe(arg) for arg in args)}"
    if origin is dict:
        return f"mapping of {describe(args[0])} to {describe(args[1])}"
    return " ".join([filled + _TYPES.get(annotation, str(annotation)), *_constraints(metadata)])


def describe_field(field: FieldInfo) -> str:
    """Description of the values that a key accepts."""
    return describe(field.annotation, field.metadata)


def _constraints(metadata: Sequence[Any]) -> Iterator[str]:
    items = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = []
    for name, (sign, strictest) in _BOUNDS.items():
        limits = [getattr(item, name) for item in items if getattr(item, name, None) is not None]
        if limits:
            bounds.append(f"{sign} {strictest(limits)}")
    if bounds:
        yield " and ".join(bounds)
    patterns = (item.pattern for item in items if getattr(item, "pattern", None) is not None)
    yield from (_PATTERNS.get(pattern, f"matching {pattern}") for pattern in patterns)
    yield from (text for marker, text in _UNITS.items() if marker in items)


def section_of(annotation: Any) -> type[Section] | None:
    """The configuration section that a key of this type holds: itself, optional, or in a list."""
    if isclass(annotation) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def item_suffix(field: FieldInfo) -> str:
    """`[i]` for a key that holds a list of sections, else nothing."""
    return "[i]" if "list of sections" in describe_field(field) else ""


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `section` with its path, e.g. `stages[i].tokens`."""
    for name, field in section.fields().items():
        path = f"{prefix}{name}"
        yield path, field
        if (inner := section_of(field.annotation)) is not None:
            yield from walk(inner, f"{path}{item_suffix(field)}.")


def explain(error: ValidationError, root: type[Section], names: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The problems pydantic found in a value for `root`, one line each.

    names  what a path is called where the value comes from, if not as in the recipe
    """
    # A key that accepts several types yields one error a type: the dict keeps one line for each path.
    problems: dict[str, str] = {}
    found = error.errors(include_url=False)
    for details in found[:MOST_PROBLEMS]:
        path, problem = _explain_one(details, root)
        problems.setdefault(path, f"{names.get(path, path)}: {problem}")
    more = len(found) - MOST_PROBLEMS
    return [*problems.values(), *([f"... and {more} more problems"] if more > 0 else [])]


def _explain_one(details: ErrorDetails, root: type[Section]) -> tuple[str, str]:
    section: type[Section] | None = root
    keys: list[int | str] = []
    allowed = "section"
    for part in details["loc"]:
        if isinstance(part, str) and section is not None and part in section.fields():
            keys.append(part)
            allowed = describe_field(section.fields()[part])
            section = section_of(section.fields()[part].annotation)
        elif section is not None or (part != "[key]" and allowed.startswith(("list", "non-empty list", "mapping"))):
            keys.append(part)  # anything else is pydantic's name for one of the types a key accepts
    path = format_path(keys)
    if section is not None and section is not root:
        allowed += f", such as {_example(section, 'list of' in allowed)}"

    match details["type"]:
        case "missing":
            packaged = "; or take a packaged one, such as `extends: qwen3-0.6b`" if path == "model" else ""
            return path, f"missing; allowed: {allowed}{packaged}"
        case "extra_forbidden" | "invalid_key":
            return path, _unknown_key(str(details["loc"][-1]), details["input"], section, root)
        case "value_error":
            return path, str(details["ctx"]["error"])
        case "model_type":
            known = ", ".join(section.fields()) if section is not None else "of the recipe"
            return path, f"given {given(details['input'])}; allowed: a section with the keys {known}"
        case "finite_number":
            allowed = f"a finite {allowed}"
    return path, f"given {given(details['input'])}; allowed: {allowed}"


def _example(section: type[Section], listed: bool) -> str:
    """A section with its required keys or, if it has none, its first ones."""
    fields = section.fields()
    keys = [key for key, field in fields.items() if field.is_required()] or list(fields)[:3]
    text = f"{{{', '.join(f'{key}: ...' for key in keys)}}}"
    return f"[{text}]" if listed else text


def _unknown_key(key: str, value: object, section: type[Section] | None, root: type[Section]) -> str:
    known = list(section.fields()) if section is not None else []
    told = section.not_here.get(key) if section is not None else None
    hint = f" ({told})" if told else did_you_mean(key, known)
    if not hint:
        is_section = isinstance(value, Mapping)  # it is no misplaced key that holds something else
        found = ((path, field) for path, field in walk(root) if path.rpartition(".")[2] == key)
        elsewhere = [path for path, field in found if section_of(field.annotation) or not is_section]
        hint = f"; a key of that name is at {' and '.join(elsewhere)}" if elsewhere else ""
        if is_section and not hint and section is not None and issubclass(section, OpenSection):
            hint = " (no plug-in of that name is installed)"
    return f"unknown key{hint}; allowed here: {', '.join(known)}"
