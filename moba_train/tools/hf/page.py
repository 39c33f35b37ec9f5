"""docs/reference/model-families.md: what goes in and out of each family of published models, from the families
themselves."""

import json
from collections.abc import Iterator
from inspect import cleandoc
from textwrap import fill

from moba_train.config.model import ModelConfig
from moba_train.registry import MODEL_FAMILIES
from moba_train.tools.hf.family import CODE, NO_FUNCTION, Family
from moba_train.tools.hf.rope import ROPE_KEYS

_SIZES = {*Family.same, "head_dim", "rope", "embedding_scale", "attention_scale"}
"""Keys of `model` that all models have, with values of their own."""

_PUBLISHED = {name: family for name, family in MODEL_FAMILIES.items() if not family.asked_for}
"""All but those that an export takes only where `--as` or `--with-code` asks for them."""

_INTRODUCTION = """\
# Model families

Generated from the families by `python -m moba_train.tools.reference`; do not edit. What was compared with transformers
is in [models](models.md).

A family is imported and exported by its `model_type`. Its models have these values of `model`, in addition to sizes,
and these [attention kinds](attention-kinds.md), which the recipe of an import has as well.
"""
_REFUSED = f"""
## What is refused

A config.json with another value of a key in this table is refused, as it would be another model. So are types of RoPE
other than {", ".join(f"`{name}`" for name in ROPE_KEYS)}, tensors that the model does not have, and quantised weights
other than gpt-oss's.

| key | only value | families |
|---|---|---|
"""
_REST = """\
These keys say nothing of the model's function: {}. Every other key that nothing reads is
listed when weights are loaded. So are `layer_types` and keys of RoPE without effect, and {} of another class. Tensors
that are left aside, and named: {}.
"""


def families_page() -> str:
    """The page."""
    return "".join((_INTRODUCTION, "\n", *_rows(), _REFUSED, *_refusals(), _rest()))


def _rows() -> Iterator[str]:
    yield "| models | `model_type`, class | values of `model` | kinds |\n|---|---|---|---|\n"
    usual = ModelConfig(vocab_size=2, hidden_size=2, intermediate_size=1, layers=1, heads=1, kv_heads=1).model_dump()
    for name, made in _PUBLISHED.items():
        family: Family = made()
        sizes = dict.fromkeys(family.sizes(), 8192) | {"num_hidden_layers": 64, "num_attention_heads": 64}
        config = family.completed({"model_type": name, **sizes})
        values = ModelConfig.model_validate(family.values(config)).model_dump()
        others = [f"`{key}`" for key, value in values.items() if key not in _SIZES and usual.get(key) != value]
        kinds = dict.fromkeys(layer.get("kind", "full") for layer in family.attention(config))
        models = cleandoc(made.__doc__ or "").split("\n\n")[0].replace("\n", " ").removesuffix(".")
        yield (
            f"| {models} | `{name}`, `{family.architecture}` | {', '.join(others) or 'none'} | "
            f"{', '.join(f'`{kind}`' for kind in kinds)} |\n"
        )


def _refusals() -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, family in _PUBLISHED.items():
        for key, value in family.fixed.items():
            found.setdefault((key, json.dumps(value)), []).append(name)
    for (key, value), names in sorted(found.items()):
        lacking = [name for name in _PUBLISHED if name not in names]
        most = "all" if not lacking else f"all but {', '.join(lacking)}"
        yield f"| `{key}` | `{value}` | {min(most, ', '.join(names), key=len)} |\n"


def _rest() -> str:
    aside = {f"`{name}*` of {kind}" for kind, family in _PUBLISHED.items() for name in family.left_aside}
    keys = ", ".join(f"`{key}`" for key in sorted(NO_FUNCTION))
    text = _REST.format(keys, " and ".join(f"`{key}`" for key in CODE), ", ".join(sorted(aside)))
    return f"\n{fill(text, 120)}\n"
