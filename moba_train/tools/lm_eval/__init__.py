"""`moba-train lm-eval`: tasks of the package lm-eval on our own model."""
