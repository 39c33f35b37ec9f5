"""moba_train: distributed long-context pretraining around MoBA (Mixture of Block Attention).

cli           `moba-train`
commands      its longer commands, and what it shares with `moba-data`
train         the program that torchrun starts on every rank
launch        torchrun, with the exit code of the ranks
cluster       what starts a recipe on several nodes: torchrun, Slurm, Kubernetes
training      the one training loop, its progress and checkpoints
validation    combinations of keys that cannot work
report        the HTML report and plots of runs, what differs between two, scaling fits
convert       Hugging Face in and out
reference     docs/config.md and the JSON schema, generated
config        the recipe: schema, loading, validation
planning      what a recipe costs before it runs
model         the Transformer on one device
attention     full attention and MoBA
parallel      sharding and context parallelism, applied to the model from outside
data          from corpora on disk to micro-batches
optim         optimizer, clipping, learning rate
checkpoint    saving, verifying and resuming
health        loss spikes, faults of the machine, stalled and slow ranks
telemetry     metrics and events, and where they go
evals         loss, loss by position, needles, RULER, gate probes, gradient reach
inference     generation
integrations  our attention inside other programs
environment   `moba-train env`
foreign_files  files from elsewhere: what may be opened, and how much of it
optional_imports  what of other packages can be imported, or why not
strict_json   numbers that JSON lacks, as strings in the files of a run
number_ranges  layers and ranks in messages
error_output  how an error of the user's is printed, and torchrun kept from adding to it
errors        errors that users can correct

Importing the package is cheap on purpose: torch is imported by the modules that need it, so that
`moba-train --help` and the data tools start at once.
"""

__version__ = "0.1.0"
