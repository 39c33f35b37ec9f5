"""Health of a run: loss spikes and the reaction to them, faults of the machine, ranks that stall, ranks that are slow.

spike       the score of each step's loss and gradient norm
reaction    the decision what to do about a spike
dump        the file that is written at a spike
inspect     `moba-train inspect-spike`
rerun       tells a fault that repeats from one that does not
node        names a bad GPU or a full disk
gpu         the state of a GPU as its driver tells it
watch       names the rank that stalls, while the others wait
stragglers  which rank is the slowest, and by how much
"""
