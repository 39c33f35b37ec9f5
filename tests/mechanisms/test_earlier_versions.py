"""Recipes, progress and changes of earlier versions, which had other keys."""

import json
from typing import Any

import pytest
import yaml

from moba_train.config.base import SAVED
from moba_train.config.explain import section_of, walk
from moba_train.config.load import dump_config, load_config, parse_config, parse_yaml
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError, ConfigError
from moba_train.resolve.recipe import resolve
from moba_train.run.progress import check_resumable
from moba_train.run.recipe_changes import recipe_changes
from tests.run.test_progress import RECIPE, changed, in_second_stage, plan_of
from tests.run.tiny_run import Run
from tests.small_recipe import Load, Write


def test_the_recipe_of_an_older_checkpoint_is_read_without_the_keys_that_are_gone(load: Load, write: Write) -> None:
    """It gives every key of its version. In a recipe of somebody's own they are refused, with what holds instead."""
    config = load("attention.default=nsa", "stages.1.distill={}", "evaluation.needle={}")
    old = yaml.safe_load(dump_config(config))
    old["health"] |= {"rerun": {"max_transient": 1}, "max_restarts_without_progress": 20}
    old["attention"]["nsa"] |= {"separate_kv": True, "hidden": None}
    old["stages"][1]["distill"] |= {"temperature": 1.0}
    old["evaluation"]["needle"] |= {"haystack": "natural", "seed": 0}
    assert parse_config(yaml.safe_dump(old), "the checkpoint") == config
    with pytest.raises(ConfigError) as error:
        load_config(write("old.yaml", yaml.safe_dump(old)))
    assert "health.rerun: unknown key (gone: a fourth transient fault" in str(error.value)
    for key in ("attention.nsa.hidden", "stages[1].distill.temperature", "evaluation.needle.seed"):
        assert f"{key}: unknown key (gone: " in str(error.value)


def test_every_section_may_be_saved_with_the_keys_that_it_had() -> None:
    found = {section_of(field.annotation) for _, field in walk(RunConfig)}
    sections = [section for section in found if section is not None and section.not_here]
    assert len(sections) > 12
    for section in sections:
        assert not section.not_here.keys() & section.fields().keys(), section
        assert section.model_validate(dict.fromkeys(section.not_here), context=SAVED) == section()


def test_keys_of_the_model_that_are_gone_or_were_not_yet_there_change_nothing() -> None:
    moe = {"experts": 4, "active": 2, "intermediate_size": 8}
    run = changed("model", RECIPE["model"] | {"moe": moe})
    progress = in_second_stage()
    progress.data_plan = plan_of(run)
    progress.data_plan["model"]["moe"]["router"]["counted"] = "loss_tokens"
    del progress.data_plan["model"]["norms"], progress.data_plan["model"]["moe"]["clamp"]
    check_resumable(run, progress, "step 15")
    with pytest.raises(CheckpointError, match=r"model\.moe\.active was 2 when it was saved and is 1 now"):
        check_resumable(changed("model", RECIPE["model"] | {"moe": moe | {"active": 1}}), progress, "step 15")


def test_keys_that_are_gone_are_changes_where_training_was_another_one(run: Run) -> None:
    run.recipe["optim"] |= {"kind": "muon", "muon": {}}
    run.recipe["stages"][1]["distill"] = {}
    config = load_config(run.write_recipe())
    values: dict[str, Any] = json.loads(json.dumps(parse_yaml(dump_config(config), "")))
    values["optim"]["muon"] |= {"nesterov": True, "steps": 3}
    values["stages"][1]["distill"] |= {"temperature": 2.0}
    values["health"]["max_restarts_without_progress"] = 7
    changes = recipe_changes(json.dumps(values), dump_config(config))
    assert changes == {"optim.muon.steps": [3, 5], "stages[1].distill.temperature": [2.0, 1.0]}


@pytest.mark.parametrize(
    "overrides",
    [
        ["evaluation.longppl={}", "data.validation=[{path: v}]"],
        ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}"],
        ["stages.1.distill={}"],
    ],
)
def test_a_model_that_an_earlier_version_trained_is_read(load: Load, overrides: list[str]) -> None:
    """Such versions trained kinds without full attention with what needs it."""
    config = load("stages.1.attention={default: nsa}", "attention.overrides={}", *overrides)
    with pytest.raises(ConfigError, match="layers of nsa have no full attention"):
        resolve(config)
    resolve(config, allow_idle=True)
