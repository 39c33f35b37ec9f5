"""What only some attentions can do: each facet is a class that such an attention also inherits from."""
