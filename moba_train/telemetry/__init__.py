"""Metrics and events of a run, and the sinks that receive them: JSONL always; console, wandb and TensorBoard by choice.

telemetry         the trainer's reports, handed to every sink
factory           the sinks that a recipe asks for
jsonl             `metrics.jsonl`, the complete history
atomic            small files that are replaced at once
outage            a sink that fails for a while, counted and reported
console           the terminal
wandb_sink        Weights & Biases, in a thread of its own
wandb_history     what a wandb run already contains, across restarts
tensorboard_sink  TensorBoard
numbers           the fields of a record that can be drawn as curves
boundary          the change of the loss between two stages
code_version      the code a run was trained with
machine           the machine a run trains on
"""
