"""Metrics and events of a run, and where they go: JSONL always; terminal, wandb and TensorBoard by choice."""
