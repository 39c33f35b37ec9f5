"""Evaluations that run inside training and from the command line.

evaluation       the interface
registry         the evaluations there are
validation_loss  mean token loss on held-out text
position_wise    loss by position in the context
variants         the attentions that the same weights are evaluated with
stage            evaluations while a stage trains
checkpoint       `moba-train eval`
options          what it is asked for
results          what it found, as JSON beside the checkpoint
"""
