"""Training: one model taken through the stages of a recipe.

trainer         the one training loop
step            one optimizer step: its data, and the counts of all ranks
evaluations     the evaluations of a run: when they run, what stops them, whether they end the stage
reports         what a run reports about itself besides metrics
stage_exit      the exit criterion of a stage
progress        what a checkpoint stores besides tensors
checkpoints     save, resume and roll back
first_start     checkpoints that a run has had and that are not found
resumable       whether a recipe that has changed can go on with a checkpoint's tensors
start_warnings  what a plan says about the run folder
restarts        starts that make no progress
recipe_changes  a recipe that changes when a run resumes
corpora         whether a resumed run reads the corpora that it was trained and evaluated on
stop            SIGTERM, SIGHUP and Ctrl-C, from the first second
stop_time       how long a run needs to stop in order, from what it has measured
recovery        acts on a loss spike
throughput      tokens per second, memory, MFU
determinism     `deterministic: true`
"""
