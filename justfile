# The commands that one types: `just` lists them. Each sets up .venv the first time.

_list:
    @just --list --unsorted

# make .venv with everything for development
setup:
    bash launch/setup.sh

# run the tests; arguments go to pytest, such as -m "not slow" or tests/config
[positional-arguments]
test *arguments:
    bash launch/test.sh "$@"

# ruff check and ruff format --check
lint:
    bash .ci/run lint

# mypy
types:
    bash .ci/run types

# train the miniature on real text; --corpus FILE_OR_FOLDER
[positional-arguments]
quickstart *arguments:
    bash launch/quickstart.sh "$@"
