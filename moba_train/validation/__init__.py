"""Checks across the keys of a recipe: combinations that cannot work are refused before any GPU is touched.

recipe           `validate`: every check of a recipe, all problems at once
attention        kinds and options of the layers
data             corpora and tokenizer
stage_exit       stages that train until a criterion is met
pipeline         layers, micro-batches and evaluations of pipeline parallelism
tensor_parallel  sizes that tensor parallelism must divide
trainable        stages that train a part of the parameters
warnings         what works but is hardly meant, said at the start of a run and by `moba-train plan`
checkpoints      a checkpoint's own recipe, checked before it is used
evaluated        a checkpoint's recipe with the options of `moba-train eval` laid over it
saved_paths      where the files lie that such a recipe names
foreign_paths    files that such a recipe may make this process read
"""
