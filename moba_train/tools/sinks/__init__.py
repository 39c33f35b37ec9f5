"""Telemetry sinks of packages that are extras: wandb and TensorBoard."""
