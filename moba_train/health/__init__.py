"""Health of a run: loss spikes and the reaction to them, faults of the machine, ranks that stall or are slow."""
