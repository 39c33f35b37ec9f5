"""Metrics and events of a run, and the sinks that receive them: JSONL always, others by choice."""
