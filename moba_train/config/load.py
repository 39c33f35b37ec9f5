"""From YAML files and `key.path=value` overrides to a checked `RunConfig`, and back.

A recipe may say `extends: other.yaml` (or a list): those files, found relative to it, are laid under it in order.
Mappings are merged key by key and later values win; lists and plain values are replaced. A name for which there is no
file, such as `quickstart`, is that of a packaged recipe.
"""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from moba_train.config.base import SAVED, Section
from moba_train.config.explain import describe_field, did_you_mean, explain, format_path, given, path_keys, section_of
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.errors import ConfigError
from moba_train.foreign_files import read_foreign

_MERGED = {"attention": "attention", "model.rope": "rope", "parallel": "parallel"}
"""Sections of a recipe that a stage's own is merged over, key by key: an override of them may change nothing."""
_REPLACED = {
    "batch_tokens": "batch_tokens",
    "micro_batch_size": "micro_batch_size",
    "data.train": "train",
    "optim.lr": "lr",
    "optim.schedule": "schedule",
}
"""Keys of a recipe that a stage's own replaces."""


def shadowed_overrides(stages: Sequence[StageConfig], overrides: Sequence[str], used: Collection[int]) -> list[str]:
    """Problems of the `overrides` of a recipe's key that all `used` ones of its `stages`, by index, set themselves.

    A stage's key that is also among the overrides hides nothing: it was given on purpose. Overrides whose value is a
    mapping are not looked into.
    """
    problems = []
    given = [_path(override) for override in overrides]
    for override in overrides:
        value = override.partition("=")[2]
        own = _own_key(_path(override))
        if own is None or not all(_hides(stages, index, own, given) for index in used):
            continue
        names = ", ".join(repr(stages[index].name) for index in used)
        instead = " ".join(shlex.quote(f"stages.{index}.{own}={value}") for index in used)
        sets = "every stage sets" if len(used) == len(stages) else f"stage {names} sets"
        problems.append(f"override {override!r}: would change nothing, as {sets} {own} itself; give {instead}")
    return problems


def _path(override: str) -> str:
    """The key of an override, with items of lists by number."""
    return ".".join(map(str, path_keys(override.partition("=")[0])))


def _hides(stages: Sequence[StageConfig], index: int, own: str, given: Sequence[str]) -> bool:
    """True if the stage's file sets the key `own`, and no override does."""
    key = f"stages.{index}.{own}"
    on_purpose = any(f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}.") for path in given)
    return not on_purpose and _sets(stages[index], own)


def _own_key(key: str) -> str | None:
    """Name that `key` of a recipe has in a stage; None for one that stages do not have."""
    for ours, theirs in {**_MERGED, **_REPLACED}.items():
        if key == ours or key.startswith(f"{ours}."):
            return theirs + key.removeprefix(ours)
    return None


def _sets(stage: StageConfig, key: str) -> bool:
    """True if the stage gives a value that replaces `key`."""
    first, *rest = key.split(".")
    value = stage.dump_given().get(first)
    if [first, *rest[:1]] == ["attention", "overrides"]:  # a stage's replace the recipe's
        return value is not None and "overrides" in value
    if value is None or first in _REPLACED.values():
        return value is not None
    for part in rest:
        if not isinstance(value, dict):
            return True
        value = {str(name): inner for name, inner in value.items()}
        if part not in value:
            return False
        value = value[part]
    return bool(rest) and not isinstance(value, dict)


RECIPE_BYTES = 256 << 10
"""Largest recipe; one that is written by hand has some kilobytes. PyYAML needs 5 s for the worst of this size."""
MOST_FILES = 64
"""Files that a recipe may extend, directly and indirectly, each counted as often as it is extended."""
MOST_VALUES = 100_000
"""Keys and values of a YAML document, those behind an alias counted each time."""

PACKAGED = Path(__file__).parents[1].resolve() / "configs"
"""Recipes and models that travel in the wheel. In a checkout it is a link to configs/."""

_YAML_HINTS = {
    "'\\t'": "indent with spaces, not with tabs",
    "mapping values": "a value that contains a colon and a space needs quotes",
    "<block end>": "indent this line as the other lines of its section",
    "end of stream": "a quote or bracket before it is not closed",
    "<stream end>": "a quote or bracket before it is not closed",
}
"""Usual causes of a syntax error, by a part of PyYAML's message."""


def packaged_recipes() -> dict[str, Path]:
    """Packaged recipes, then packaged models, by name: the path below configs/recipes or configs/models, without
    `.yaml`."""
    folders = (PACKAGED / "recipes", PACKAGED / "models")
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted(folder.rglob("*.yaml"))
    }


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe in the YAML file `path`, with `overrides` such as `stages.0.tokens=1M` applied last.

    If there is no such file, `path` may be the name of a packaged recipe.

    Raises ConfigError with every problem: unreadable files, YAML errors, unknown keys, values of the wrong type, and
    overrides that change nothing because every stage sets the key itself. Combinations of keys are left to `validate`.
    """
    config = validated(_read_recipe(str(path), Path(), (), []), overrides)
    if problems := shadowed_overrides(config.stages, overrides, range(len(config.stages))):
        raise ConfigError(problems)
    return config


def parse_config(text: str, source: str) -> RunConfig:
    """The recipe that `dump_config` wrote, in this version or an earlier one. Raises ConfigError, naming `source`, when
    this version cannot read it."""
    try:
        return RunConfig.model_validate(parse_yaml(text, source), context=SAVED)
    except ValidationError as error:
        raise ConfigError([f"{source}: {problem}" for problem in explain(error, RunConfig)]) from None


def validated(raw: dict[Any, Any], overrides: Sequence[str]) -> RunConfig:
    """The recipe with these values, and `overrides` applied to them. Raises ConfigError with every problem."""
    problems = apply_overrides(raw, overrides)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(problems + explain(error, RunConfig)) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: RunConfig) -> str:
    """YAML with every key of the recipe. `load_config` makes an equal `RunConfig` of it.

    Stages keep only the keys they set: what a stage leaves out comes from the recipe, so a default written down
    there would win over the recipe's value.
    """
    data = config.model_dump(exclude={"stages"})
    data["stages"] = [stage.dump_given() for stage in config.stages]
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def deep_merge(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`over` laid on `base`, key by key where both hold a mapping; a new dict."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = deep_merge(merged[key], value) if both else value
    return merged


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML document, None when it is empty.

    Raises ConfigError naming `source` and the line for syntax errors and duplicate keys, and when the document is too
    large, nested too deeply, or becomes too large through its aliases.
    """
    if len(text) > RECIPE_BYTES:
        raise ConfigError([f"{source}: has {len(text):,} characters; allowed: {RECIPE_BYTES:,}"])
    try:
        try:
            node = _FastLoader(text).get_single_node()  # type: ignore[call-arg]  # of its base that mypy knows
        except yaml.YAMLError:  # of which PyYAML's own parser says more
            node = _Loader(text).get_single_node()
        if node is None:
            return None
        if (values := _count(node, {})) > MOST_VALUES:
            raise ConfigError([f"{source}: has {given(values)} values, aliases replaced; allowed: {MOST_VALUES:,}"])
        if duplicates := _duplicate_keys(node):
            raise ConfigError([f"{source}, {problem}" for problem in duplicates])
        return _PlainValues().construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or ""
        hint = next((f"; {text}" for part, text in _YAML_HINTS.items() if part in problem), "")
        raise ConfigError([f"{source}{where}: not valid YAML: {problem}{hint}"]) from None
    except RecursionError:
        raise ConfigError([f"{source}: is nested too deeply"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{source}: not valid YAML: {' '.join(str(error).split())}"]) from None


def apply_overrides(raw: dict[Any, Any], overrides: Sequence[str]) -> list[str]:
    """Set each `key.path=value` in `raw`, in place; the value is YAML, list items go by number (`stages.0.tokens`).

    The other items of a list that `raw` leaves out are its default's (`optim.betas.1=0.99`). Returns the problems;
    those of unknown keys show up when `raw` is validated.
    """
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path_keys(path)
        if not equals or "" in keys:
            problems.append(f"override {override!r}: allowed: key.path=value, e.g. optim.lr=1e-4 or stages.0.tokens=1M")
            continue
        if keys[0] == "extends":
            problems.append(
                f"override {override!r}: allowed only in a recipe, extends: FILE; write one that extends both"
            )
            continue
        try:
            _assign(raw, keys, parse_yaml(text, f"override {override!r}"))
        except ConfigError as error:
            problems += error.problems
        except (KeyError, IndexError, TypeError) as error:
            problems.append(f"override {override!r}: {error.args[0]}")
    return problems


def _assign(raw: Any, keys: list[int | str], value: Any) -> None:
    holder = raw
    for depth, key in enumerate(keys):
        where = format_path(keys[:depth])
        if isinstance(holder, list):
            if not holder:
                raise IndexError(f"{where} has no items; set {where} itself")
            if not isinstance(key, int):
                raise TypeError(f"{where} is a list; allowed: a number from 0 to {len(holder) - 1}, e.g. {where}.0")
            if key >= len(holder):
                raise IndexError(f"{where}[{key}] does not exist; allowed: 0 to {len(holder) - 1}")
        elif not isinstance(holder, dict):
            raise TypeError(f"{where} is {given(holder)}, which holds no {key!r}; set {where} itself")
        if depth == len(keys) - 1:
            holder[key] = value
            return
        if isinstance(holder, dict) and holder.get(key) is None:
            holder[key] = _left_out(keys[: depth + 1], keys[depth + 1])
        holder = holder[key]


def _left_out(keys: Sequence[int | str], inner: int | str) -> dict[Any, Any] | list[Any]:
    """Value at `keys`, which the recipe leaves out, before its part `inner` is set: a mapping, or the
    default of a list. Raises TypeError for a list whose other items are not known."""
    section: type[Section] | None = RunConfig
    field: FieldInfo | None = None
    for key in keys:
        if isinstance(key, str):
            field = section.fields().get(key) if section is not None else None
            section = section_of(field.annotation) if field is not None else None
    if field is None or not isinstance(inner, int) or "list of" not in describe_field(field):
        return {}
    where = format_path(keys)
    allowed = f"set {where} itself, {describe_field(field)}"
    if keys[0] == "stages" and len(keys) > 1:
        raise TypeError(f"{where} is left out, so that the recipe's counts; {allowed}")
    default = field.get_default()
    if not isinstance(default, list | tuple):
        was = "" if field.is_required() else f", its default is {given(default)}"
        raise TypeError(f"{where} is left out{was}; {allowed}")
    return list(default)


def _read_recipe(name: str, folder: Path, chain: tuple[Path, ...], extended: list[Path]) -> dict[Any, Any]:
    """The mapping in the file `name`, relative to `folder`, or else in the packaged recipe `name`, with everything it
    extends.

    chain     the files that led here
    extended  every file that was read for this recipe, in order; this one is added
    """
    path = folder / name
    if not os.path.exists(path):
        path = packaged_recipes().get(name, path)
    if chain:
        extended.append(path)
    if len(extended) > MOST_FILES:
        allowed = f"allowed: {MOST_FILES} files, each counted as often as it is extended"
        raise ConfigError([f"extends: reaches {path} as file {len(extended)}, through {chain[-1]}; {allowed}"])
    try:
        resolved = path.resolve()
        if resolved in chain:
            names = " -> ".join(str(link) for link in (*chain, resolved))
            raise ConfigError([f"extends: goes in a circle: {names}"])
        text = _read_text(path, chain).decode()
    except (OSError, ValueError) as error:
        by = f" (extended by {chain[-1]})" if chain else ""
        raise ConfigError([f"{path}{by}: cannot be read: {_why_unread(path, error)}"]) from None

    raw = parse_yaml(text, str(path))
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: given {given(raw)}; allowed: a mapping of keys to values"])
    parents = raw.pop("extends", [])
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError([f"{path}: extends: given {given(parents)}; allowed: a relative path or a list of them"])
    merged: dict[Any, Any] = {}
    for parent in parents:
        merged = deep_merge(merged, _read_recipe(parent, path.parent, (*chain, resolved), extended))
    return deep_merge(merged, raw)


def _why_unread(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.object[error.start]:#04x} at position {error.start})"
    reason = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, FileNotFoundError):
        return reason
    if "=" in path.name:
        return f"{reason}; the recipe comes first, key.path=value after it"
    where = "" if path.is_absolute() else f" (from {Path.cwd()})"
    if path.suffix in (".yaml", ".yml"):
        return f"{reason}{where}{did_you_mean(path.name, [file.name for file in path.parent.glob('*.y*ml')])}"
    names = packaged_recipes()
    return f"{reason}{where}{did_you_mean(path.name, [*names])}; packaged recipes and models: {', '.join(names)}"


def _read_text(path: Path, chain: tuple[Path, ...]) -> bytes:
    """Text of the file `path`. The user names the recipe itself, which may be a pipe, but not what it extends."""
    if chain:
        return read_foreign(path, RECIPE_BYTES)
    with path.open("rb") as stream:
        text = stream.read(RECIPE_BYTES + 1)
    if len(text) > RECIPE_BYTES:
        raise ValueError(f"has more than {RECIPE_BYTES:,} bytes; allowed: {RECIPE_BYTES:,}")
    return text


class _PlainValues(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """Safe YAML with the plain values of YAML 1.2's core schema.

    PyYAML follows YAML 1.1, where `5e6` is text, `no` is false, `12:30` is 750 and `2024-01-01` a date.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The object that PyYAML constructs. Raises ConstructorError, with the text and the tag, for text that a tag
        such as !!bool does not allow: PyYAML's own errors do not name it."""
        try:
            return super().construct_object(node, deep)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.constructor.ConstructorError(
                None, None, f"{given(node.value)} is no {tag}; leave the tag out", node.start_mark
            ) from error


class _Loader(_PlainValues, yaml.SafeLoader):
    """By PyYAML's own parser."""


class _FastLoader(_PlainValues, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # whichever there is
    """By the parser of libyaml: a recipe in 0.1 ms instead of 1.7 on a CPU."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # libyaml's is faster
    """Writes tuples as lists, each value in full where it is used (no anchors), and quotes what YAML 1.1 or 1.2 would
    read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_DIGITS = r"[0-9][0-9_]*"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        rf"[-+]?({_DIGITS}\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|{_DIGITS}[eE][-+]?[0-9]+|\.(inf|nan))",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    for _class in (_PlainValues, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Number of keys and values below `node`, those behind an alias counted each time. Raises ValueError if an alias
    stands for something that contains it."""
    if id(node) in counts:
        if not counts[id(node)]:
            raise ValueError(f"line {node.start_mark.line + 1}: an alias to this contains itself")
        return counts[id(node)]
    counts[id(node)] = 0
    counts[id(node)] = 1 + sum(_count(part, counts) for part in _parts(node))
    return counts[id(node)]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """The nodes right below `node`: items, or keys and values."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _duplicate_keys(node: yaml.Node) -> list[str]:
    """A problem for every key that one mapping below `node` gives twice."""
    problems = []
    seen_nodes: set[int] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if id(current) in seen_nodes:  # an alias
            continue
        seen_nodes.add(id(current))
        pending += _parts(current)
        lines: dict[tuple[str, str], int] = {}
        for key in _parts(current)[::2] if isinstance(current, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                name = (key.tag, key.value)
                if name in lines:
                    problems.append(f"line {line}: key {key.value!r} is already given in line {lines[name]}")
                lines.setdefault(name, line)
    return problems
