"""The recipe: its schema (one file a section), loading.

base            the strict pydantic base class
quantities      whole numbers with suffixes: `128K`, `10B`
schema          `RunConfig`, the whole recipe
model           the shape of the Transformer
attention       the per-layer grammar
data            where the tokens come from
optim           optimizer and learning-rate schedule
run             the sections about running: layout, precision, checkpoints, exit criteria, logging, health
evaluation      what is measured while a run trains
stages          what each stage comes to once its defaults are filled in
load            YAML with `extends:` and command-line overrides
shadowed        overrides that stages hide
explain         what a key accepts, and what is wrong with a recipe, in plain words
mesh            the sizes of the device mesh for a number of ranks
"""
