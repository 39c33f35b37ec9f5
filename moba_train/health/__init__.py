"""Watching a run: loss spikes and what is done about them, ranks that stall, ranks that are slow."""
