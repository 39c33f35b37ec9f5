"""The small recipe that tests of this folder change."""

from tests.small_recipe import load, recipe, write

__all__ = ["load", "recipe", "write"]
