"""Abilities that only some attentions have: each facet is a class that such an attention also inherits from."""
