"""Watching a run: loss spikes and values that are not numbers."""
