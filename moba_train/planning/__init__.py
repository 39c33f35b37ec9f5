"""What a recipe costs before it runs: parameters, FLOPs, memory, time.

parameters  exact counts by part
documents   lengths of the documents in a stage's sequences
flops       per token, as dense causal attention and as what each layer really attends to
memory      bytes per GPU by part, an estimate
devices     peak rates of known GPUs
plan        the plan of a recipe, from all of these
render      the plan as tables
summary     a run in a few lines, for the beginning of its output
"""
