"""docs/config.md and docs/config.schema.json, generated from the schema.

python -m moba_train.tools.reference            write both
python -m moba_train.tools.reference --check    exit 1 when they are not what the schema gives
"""

import argparse
import json
import sys
from inspect import cleandoc
from pathlib import Path

from pydantic.fields import FieldInfo

import moba_train.attention.registry  # noqa: F401  # the kinds' sections
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.base import Section
from moba_train.config.explain import describe_field, item_suffix, section_of
from moba_train.config.load import parse_yaml
from moba_train.config.schema import RunConfig
from moba_train.output_files import write_atomically

DOCS = Path(__file__).parents[2] / "docs"

_INTRODUCTION = """\
# Configuration reference

Generated from the schema by `python -m moba_train.tools.reference`; do not edit.

A recipe is a YAML file. `extends: other.yaml` (or a list of files, relative to the recipe) lays it over other files:
mappings are merged key by key and later values win, lists are replaced. `key.path=value` on the command line wins over
everything (`optim.lr=1e-4`, `stages.0.tokens=1M`, `attention.overrides.5.topk=4`); it may set one item of a list that
the recipe leaves out (`optim.betas.1=0.99`): the others are the default's. A key that every stage sets itself is
refused there, as it would change nothing; the message names the stages' keys. `moba-train config RECIPE` prints the
result, `moba-train plan RECIPE` checks it and says what it costs.

Numbers marked (K, M = 1024) are lengths: `128K` is 131072 tokens. Those marked (K, M, B, T = 1000) are token budgets:
`1B` is 1000000000 tokens. Numbers follow YAML 1.2, so `5e6` and `1e-4` are numbers; only `true` and `false` are
booleans.
Editors that read JSON schemas find this one in `config.schema.json`.
"""

_EXAMPLE = """\
attention:
  default: moba
  full_layers: "last:2"
  moba: {block_size: 4096, topk: 12}
  overrides: {1: {block_size: 1024}, 3: {kind: full}}
"""
_EXAMPLE_LAYERS = 6
_EXAMPLE_NOTES = """\
`default` is the kind of every layer, `full_layers` makes some of them full, `overrides` settles single layers and wins.
A stage's `attention` is merged over the recipe's key by key (its `overrides` replace the recipe's), so
`attention: {default: full, full_layers: none, overrides: {}}` makes a stage dense and
`attention: {moba: {topk: 4}}` changes only that number.
"""


def reference() -> str:
    """The text of docs/config.md."""
    headings: dict[type[Section], str] = {RunConfig: "The recipe"}
    _collect(RunConfig, "", headings)
    return "\n".join([_INTRODUCTION, *(_section(section, headings) for section in headings), _layers_example()])


def json_schema() -> str:
    """The JSON schema of a recipe, for editors. Nothing is required: `extends` may bring any key."""
    schema = RunConfig.model_json_schema()
    schema["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "files to lay this one over, relative to it; later ones win",
    }
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    return json.dumps(schema, indent=2) + "\n"


def _collect(section: type[Section], path: str, headings: dict[type[Section], str]) -> None:
    """Add every section below `section` to `headings`, under the first path it is found at."""
    for name, field in section.fields().items():
        inner = section_of(field.annotation)
        if inner is not None and inner not in headings:
            headings[inner] = f"`{path}{name}{item_suffix(field)}`"
            _collect(inner, f"{path}{name}{item_suffix(field)}.", headings)


def _section(section: type[Section], headings: dict[type[Section], str]) -> str:
    lines = [f"## {headings[section]}", "", cleandoc(section.__doc__ or ""), ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.fields().items():
        inner = section_of(field.annotation)
        value = describe_field(field)
        meaning = field.description or ""
        if inner is not None:
            value = value.replace("section", f"[section](#{_anchor(headings[inner])})")
            meaning = meaning or cleandoc(inner.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        lines.append("| " + " | ".join(map(_cell, (f"`{name}`", value, _default(field), meaning))) + " |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(heading: str) -> str:
    """The link target that Markdown viewers derive from a heading."""
    return "".join(char for char in heading.lower().replace(" ", "-") if char.isalnum() or char in "-_")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return "its defaults"
    return f"`{json.dumps(default, default=Section.model_dump)}`"


def _layers_example() -> str:
    config = AttentionConfig.model_validate(parse_yaml(_EXAMPLE, "example")["attention"])
    lines = ["## Attention layer by layer, by example", "", "```yaml", _EXAMPLE + "```", ""]
    lines += [f"In a model of {_EXAMPLE_LAYERS} layers this gives:", "", "| layer | kind | options |", "|---|---|---|"]
    for layer, attention in enumerate(resolve_layers(config, _EXAMPLE_LAYERS)):
        options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in attention.options.model_dump().items())
        lines.append(f"| {layer} | {attention.kind} | {options} |")
    lines += ["", _EXAMPLE_NOTES]
    return "\n".join(lines)


def main() -> int:
    """Write the two files, or with --check compare them; the exit code."""
    parser = argparse.ArgumentParser(description="Generate docs/config.md and docs/config.schema.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    stale = stale_files()
    for path, text in stale.items():
        print(f"{path.name} is stale: run python -m moba_train.tools.reference" if check else f"wrote {path.name}")
        if not check:
            write_atomically(path, text)
    return 1 if check and stale else 0


def stale_files() -> dict[Path, str]:
    """The generated files whose content differs from what the schema gives now, with what they should hold."""
    wanted = {DOCS / "config.md": reference(), DOCS / "config.schema.json": json_schema()}
    return {
        path: text for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    sys.exit(main())
