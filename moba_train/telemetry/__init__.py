"""Metrics and events of a run, and where they go: JSONL always; terminal, wandb and TensorBoard by choice.

telemetry         what the trainer reports, given to every sink
factory           the sinks that a recipe asks for
jsonl             `metrics.jsonl`, the complete history
console           the terminal
wandb_sink        Weights & Biases, in a thread of its own
wandb_history     what a wandb run already holds, over restarts
tensorboard_sink  TensorBoard
numbers           what of a record can be drawn as a curve
boundary          the step of the loss between two stages
code_version      which code a run was trained with
"""
