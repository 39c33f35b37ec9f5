"""A small valid recipe that the tests of this folder change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig

RECIPE = """
name: demo
run_dir: runs/demo
model:
  {vocab_size: 2048, hidden_size: 128, intermediate_size: 384, layers: 4, heads: 4, kv_heads: 2, rope: {theta: 5e5}}
attention: {moba: {block_size: 512, topk: 4}, overrides: {1: {topk: 2}}}
data: {train: [{path: corpora/a}, {path: corpora/b, weight: 3}]}
batch_tokens: 64K
stages:
  - {name: short, seq_len: 2048, tokens: 1M, attention: {default: full}}
  - {name: long, seq_len: 8K, tokens: 2M, rope: {kind: pi, factor: 4}, attention: {full_layers: "last:1"}}
"""

Write = Callable[[str, str], Path]
Load = Callable[..., RunConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the test's folder and returns its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def recipe(write: Write) -> Path:
    """A valid recipe's file."""
    return write("recipe.yaml", RECIPE)


@pytest.fixture
def load(recipe: Path) -> Load:
    """Loads the valid recipe with overrides."""
    return lambda *overrides: load_config(recipe, overrides)
