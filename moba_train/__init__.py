"""moba_train: distributed long-context pretraining around MoBA (Mixture of Block Attention).

cli           `moba-train`
train         the program that torchrun starts on every rank
trainer       the one training loop
progress      how far a run has come: what a checkpoint stores besides tensors
config        the recipe: schema, loading, validation
planning      what a recipe costs before it runs
model         the Transformer on one device
attention     full attention and MoBA
parallel      sharding and context parallelism, applied to the model from outside
data          from corpora on disk to micro-batches
optim         optimizer, clipping, learning rate
checkpoint    saving, verifying and resuming; Hugging Face in and out
health        loss spikes, stalled and slow ranks
telemetry     metrics and events, and where they go
evals         loss, and loss by position
inference     generation
integrations  our attention inside other programs
compare       what differs between two runs
determinism   `deterministic: true`
environment   `moba-train env`
commands      what the command-line programs share
pictures      the pictures of a run
errors        errors that are the user's to mend

Importing the package is cheap on purpose: torch is imported by the modules that need it, so that
`moba-train --help` and the data tools start at once.
"""

__version__ = "0.1.0"
