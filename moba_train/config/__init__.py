"""The recipe: its schema (one file a section), loading, and cross-field validation.

base        the strict pydantic base class
schema      `RunConfig`, the whole recipe
attention   the per-layer grammar
stages      what each stage comes to once its defaults are filled in
load        YAML with `extends:` and command-line overrides, errors in plain words
mesh        the sizes of the device mesh on so many ranks
validate    what no single key can know: combinations that cannot work
reference   docs/config.md and the JSON schema, generated
"""
