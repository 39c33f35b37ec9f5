"""docs/reference: config.md and config.schema.json, generated from the schema, cli.md, from the commands, and
model-families.md, from the families of published models.

python -m moba_train.tools.reference            write the four
python -m moba_train.tools.reference --check    exit 1 when they are not what schema, commands and families give
"""

import argparse
import json
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer
from pydantic.fields import FieldInfo

import data_tools.cli
import moba_train.attention.registry  # noqa: F401  # the kinds' sections
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.base import Section
from moba_train.config.explain import describe_field, item_suffix, section_of
from moba_train.config.load import parse_yaml
from moba_train.config.schema import RunConfig
from moba_train.output_files import write_atomically
from moba_train.tools.cli import app
from moba_train.tools.hf.page import families_page

DOCS = Path(__file__).parents[2] / "docs" / "reference"

_INTRODUCTION = """\
# Configuration reference

Generated from the schema by `python -m moba_train.tools.reference`; do not edit.

A recipe is a YAML file. `extends: other.yaml` (or a list of files, relative to the recipe) lays it over other files:
mappings are merged key by key and later values win, lists are replaced. `key.path=value` on the command line wins over
everything (`optim.lr=1e-4`, `stages.0.tokens=1M`, `attention.overrides.5.topk=4`); it may set one item of a list that
the recipe leaves out (`optim.betas.1=0.99`): the others are the default's. A key that every stage sets itself is
refused there, as it would change nothing; the message names the stages' keys. `moba-train config RECIPE` prints the
result, `moba-train plan RECIPE` checks it and says what it costs.

These keys stand in nearly every recipe; the others have defaults that fit most runs:

```yaml
extends: llama-1b        # the model's shape, or `init_from: FOLDER` with published weights
name: my-run
run_dir: runs/my-run                         # checkpoints, metrics.jsonl, report.html
data:
  tokenizer: tok.model
  train: [{path: data/corpus-train}]         # several: {path: ..., weight: 3}
  validation: [{path: data/corpus-valid}]
batch_tokens: 4M                             # of one optimizer step, over all ranks
optim: {lr: 3e-4}
attention:
  default: moba                              # or full, or another kind
  full_layers: "last:3"
  moba: {block_size: 512, topk: 8}
parallel: {cp: 8}                            # also in a stage
stages:
  - {name: short, seq_len: 8K, tokens: 20B, attention: {default: full}}
  - {name: long, seq_len: 128K, tokens: 2B, rope: {kind: abf, theta: 5e6}}
```

Numbers marked (K, M = 1024) are lengths: `128K` is 131072 tokens. Those marked (K, M, B, T = 1000) are token budgets:
`1B` is 1000000000 tokens. Numbers follow YAML 1.2, so `5e6` and `1e-4` are numbers; only `true` and `false` are
booleans.
Editors that read JSON schemas find this one in `config.schema.json`.
"""

_EXAMPLES = {
    "data": """\
data:                                    # three tokens of books for one of code; code of at least 8K tokens only
  tokenizer: tok.model
  train: [{path: data/books, weight: 3}, {path: data/code, weight: 1, min_length: 8K}]
  validation: [{path: data/books-valid}]
""",
    "optim": """\
optim:                                   # up in 100M tokens, along a cosine, down to a tenth
  lr: 3e-4
  schedule: {kind: cosine, warmup_tokens: 100M, min_lr_ratio: 0.1}
""",
    "stages": """\
stages:                                  # full attention at 8K, then MoBA at 128K until its loss has recovered
  - {name: short, seq_len: 8K, tokens: 20B, attention: {default: full}}
  - {name: long, seq_len: 128K, tokens: 2B, rope: {kind: abf, theta: 5e6}, parallel: {cp: 8},
     until: {trailing_loss_recovered: {tolerance: 0.01}, max_tokens: 8B}}
""",
    "parallel": """\
parallel: {cp: 8, tp: 2}                 # 16 GPUs a sequence; more GPUs are dp_shard, which fills the rest
""",
    "precision": """\
precision: {linear: fp8}                 # linear layers of the blocks; the master weights stay float32
""",
    "checkpoint": """\
checkpoint: {every: 500, keep_last: 3, keep_every: 5000, fallback_dir: /local/spare}
""",
    "evaluation": """\
evaluation:                              # loss by position and needles, with the stage's attention and with full
  every: 200
  position_wise: {bucket: 4K}
  needle: {lengths: [8K, 32K], depths: [0, 50, 100]}
""",
    "telemetry": """\
telemetry: {log_every: 10, wandb: {mode: online, project: long-context}}
""",
    "health": """\
health:                                  # a spike rolls the run back to the last good checkpoint
  spike: {reaction: rollback}
""",
}
"""An example of each section that people write, by its key in the recipe."""

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
    """The text of docs/reference/config.md."""
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
    key = headings[section].strip("`").removesuffix(item_suffix(RunConfig.fields()["stages"]))
    example = _EXAMPLES.get(key)
    return "\n".join([*lines, *(["", "```yaml", example + "```"] if example else []), ""])


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


def cli_reference() -> str:
    """The text of docs/reference/cli.md."""
    lines = [
        "# Commands",
        "",
        "Generated by `python -m moba_train.tools.reference`; do not edit. `--help` prints the same.",
    ]
    for name, program in (("moba-train", app), ("moba-data", data_tools.cli.app)):
        lines += _command(name, typer.main.get_command(program), 2)
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any, level: int) -> list[str]:
    """Lines about a command, or those of a group. Typer brings a click whose classes have no public name."""
    lines = ["", f"{'#' * level} {name}", "", cleandoc(command.help or "")]
    if hasattr(command, "commands"):
        inner = [_command(f"{name} {below}", found, level + 1) for below, found in command.commands.items()]
        return [*lines, *(line for part in inner for line in part)]
    lines += ["", "| argument | meaning | default |", "|---|---|---|"] if command.params else []
    for parameter in command.params:
        flag = getattr(parameter, "is_flag", False)
        value = "" if flag else parameter.metavar or parameter.name.upper()
        shown = value if parameter.param_type_name == "argument" else " ".join([*parameter.opts, value]).strip()
        default = "required" if parameter.required else ""
        if not flag and parameter.default not in (None, ()):
            default = f"`{parameter.default}`"
        lines.append("| " + " | ".join([f"`{_cell(shown)}`", _cell(parameter.help or ""), default]) + " |")
    return lines


def main() -> int:
    """Write the files, or with --check compare them; the exit code."""
    parser = argparse.ArgumentParser(
        description="Generate config.md, config.schema.json, cli.md and model-families.md."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    stale = stale_files()
    for path, text in stale.items():
        print(f"{path.name} is stale: run python -m moba_train.tools.reference" if check else f"wrote {path.name}")
        if not check:
            write_atomically(path, text)
    return 1 if check and stale else 0


def stale_files() -> dict[Path, str]:
    """The generated files whose content differs from what schema and commands give now, with what they should hold."""
    wanted = {"config.md": reference(), "config.schema.json": json_schema(), "cli.md": cli_reference()}
    wanted["model-families.md"] = families_page()
    files = {DOCS / name: text for name, text in wanted.items()}
    return {
        path: text for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    sys.exit(main())
