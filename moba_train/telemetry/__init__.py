"""Metrics and events of a run, and the sinks that receive them: JSONL always; console, wandb and TensorBoard by choice."""
