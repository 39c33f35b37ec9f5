"""Evaluations that run inside training and from the command line.

loss           mean token loss on held-out text
position_wise  loss by place in the context
stage          what is evaluated while a stage trains, and its gate
variants       the attentions that the same weights are evaluated with
checkpoint     `moba-train eval`
"""
