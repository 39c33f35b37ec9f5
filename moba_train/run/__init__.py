"""A run: one model taken through the stages of a recipe."""
