"""`moba-train lm-eval`: tasks of the package lm-eval on our own model.

options    what the command is asked for; imports nothing of the package
scoring    log-likelihoods of many continuations, packed into few forward passes
tokenizer  the run's tokenizer as transformers loads it
language_model  our model behind the package's interface
tasks      the package's tasks, loaded without downloads that they do not need
sample_lengths  whether RULER's tasks can make samples of a length
run        the command
"""
