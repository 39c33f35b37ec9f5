"""What no single key can know: combinations that cannot work, found before any GPU is touched.

recipe           `validate`: every check of a recipe, all problems at once
data             corpora and tokenizer
stage_exit       position-wise evaluation, and stages that train until a criterion is met
tensor_parallel  what tensor parallelism must be able to divide
trainable        names of the parameters that a stage trains
checkpoints      a checkpoint's own recipe, checked before it is used
foreign_paths    which files such a recipe may make us read
"""
