"""Evaluations that run inside training and from the command line.

evaluation       the interface
registry         the evaluations there are
validation_loss  mean token loss on held-out text
position_wise    loss by position in the context
gate_probe       what the gates of sparse layers select, in sampled queries
gate_statistics  the statistics of one layer's gate against full attention
variants         the attentions that the same weights are evaluated with
stage            evaluations while a stage trains
checkpoint       `moba-train eval`
"""
