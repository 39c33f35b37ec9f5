"""What works but is hardly meant is said, with the keys to change; the run goes on."""

import pytest
from typer.testing import CliRunner

from moba_train.cli import app
from moba_train.validation.recipe import validate
from moba_train.validation.warnings import recipe_warnings

NEVER = ["stages.0.evaluate=false", "stages.1.evaluate=false"]
VALIDATION = "data.validation=[{path: v}]"


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (NEVER, None),  # nothing is asked for
        ([VALIDATION, "evaluation.every=10", NEVER[0]], None),
        ([VALIDATION, "evaluation.position_wise={}", *NEVER], "data.validation, evaluation.position_wise: given, but"),
        (["evaluation.every=10"], "evaluation: given, but there is nothing to evaluate on; set data.validation"),
    ],
)
def test_evaluations_that_never_run_are_named(load, overrides, warning):
    config = load(*overrides)
    validate(config)
    assert [text[: len(warning or "")] for text in recipe_warnings(config)] == ([warning] if warning else [])


def test_plan_prints_them_once_and_unchanged(recipe):
    for layout in ([], ["--nodes", "1"]):
        arguments = [str(recipe), VALIDATION, *NEVER, "--no-data", *layout, "--gpu", "h200"]
        done = CliRunner().invoke(app, ["plan", *arguments])
        assert done.exit_code == 0, done.output
        (line,) = [line for line in done.output.splitlines() if line.startswith("warning: ")]
        assert "stages[i].evaluate is false in all of them" in line
