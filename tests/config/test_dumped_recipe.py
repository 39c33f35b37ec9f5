"""A recipe that is written down and read again, and the stages that follow from it."""

from pathlib import Path

import yaml

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.config.load import dump_config, load_config, parse_config
from moba_train.config.stages import timed, used_kinds
from tests.resolved import stages_of
from tests.small_recipe import Load, Write


def test_a_dumped_recipe_has_the_options_of_every_kind_that_a_layer_has(load: Load, write: Write) -> None:
    """Given or not, of the recipe or of a stage: defaults may change before the run resumes."""
    config = load("attention={default: full, moba: {topk: 5}}", "stages.1.attention={overrides: {0: {kind: moba}}}")
    text = dump_config(config)
    attention = yaml.safe_load(text)["attention"]
    assert attention["full"] == FullKind.Options().model_dump(mode="json")
    assert attention["moba"] == MobaKind.Options(topk=5).model_dump(mode="json")
    assert load_config(write("dumped.yaml", text)) == config


def test_a_dumped_recipe_loads_back_to_the_same_run(load: Load, write: Write) -> None:
    config = load("name='1e5'", "run_dir='no'", "stages.1.train=[{path: c}]", "telemetry.wandb.tags=['2024-01-01']")
    again = load_config(write("dumped.yaml", dump_config(config)))
    assert again == config
    assert stages_of(again) == stages_of(config)
    assert dump_config(again) == dump_config(config)


def test_a_recorded_run_of_an_earlier_version_is_read() -> None:
    text = (Path(__file__).parents[1] / "fixtures" / "three_stages" / "config.yaml").read_text()
    assert "alert_after_failures" in text
    assert parse_config(text, "recorded").name == "three-stages"


def test_a_dumped_stage_still_follows_the_recipe(load: Load, write: Write) -> None:
    path = write("dumped.yaml", dump_config(load()))
    layers = stages_of(load_config(path, ["attention.moba.block_size=256"]))[1].attention
    assert layers[0].options.model_dump()["block_size"] == 256


def test_a_stage_counts_on_from_the_steps_and_tokens_of_those_before(load: Load) -> None:
    """1M tokens are 15.3 batches of 64K."""
    short, long = stages_of(load())
    assert (short.end_step, long.first_step, long.first_token) == (16, 16, 16 * 65536)
    assert long.tokens_after(19) == 19 * 65536
    quick, after = timed(stages_of(load()), {"short": 5})
    assert (quick.end_step, after.first_step, after.first_token) == (5, 5, 5 * 65536)


def test_kinds_that_were_used_are_those_of_the_stages_so_far(load: Load) -> None:
    full = {(layer, "full") for layer in range(4)}
    stages = stages_of(load())
    assert used_kinds(stages[:1]) == full
    assert used_kinds(stages) == full | {(layer, "moba") for layer in range(3)}


def test_interpolating_in_a_stage_keeps_the_models_theta(load: Load) -> None:
    short, long = stages_of(load())
    assert (short.rope.theta, short.rope.kind) == (5e5, "none")
    assert (long.rope.theta, long.rope.kind, long.rope.factor) == (5e5, "pi", 4)
