"""Watching a run: loss spikes and what is done about them, ranks that stall, ranks that are slow.

spike       the score of each step's loss and gradient norm
reaction    what a run does about a spike: the decision
dump        what is written down at a spike
inspect     `moba-train inspect-spike`
watch       naming the rank that stalls, while the others wait
stragglers  which rank is the slowest, and by how much
"""
