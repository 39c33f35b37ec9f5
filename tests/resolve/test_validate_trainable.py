"""`stages[i].trainable`: names that exist, at least one of them."""

import pytest

from moba_train.config.load import dump_config, load_config
from moba_train.errors import ConfigError
from tests.resolved import check, stages_of
from tests.small_recipe import Load, Write


def test_all_is_the_default_and_patterns_are_kept(load: Load, write: Write) -> None:
    config = load("stages.1.trainable=['blocks.*.attention.*', norm.weight]")
    check(config)
    assert [stage.trainable for stage in stages_of(config)] == [("*",), ("blocks.*.attention.*", "norm.weight")]
    assert load_config(write("dumped.yaml", dump_config(config))) == config
    assert stages_of(load("stages.1.trainable=all"))[1].trainable == ("*",)


def test_a_pattern_that_matches_nothing_is_named_with_the_closest_names(load: Load) -> None:
    config = load("stages.1.trainable=[norm.weight, blocks.0.atention.q_proj.weight, zzz]")
    with pytest.raises(ConfigError) as caught:
        check(config)
    first, second = caught.value.problems
    assert first.startswith(
        "stages[1].trainable[1]: given 'blocks.0.atention.q_proj.weight', which no parameter's name"
    )
    assert "closest: blocks.0.attention.q_proj.weight" in first
    assert second.startswith("stages[1].trainable[2]: given 'zzz'")
    assert "embedding.weight" in second


def test_a_rate_for_parameters_that_are_not_there_is_refused(load: Load) -> None:
    check(load("optim.lr_factors={'*.attention.q_proj.*': 2, norm.weight: 0.5}"))
    with pytest.raises(ConfigError, match=r"optim\.lr_factors: given 'norm.weigth', which no .*: norm\.weight"):
        check(load("optim.lr_factors={norm.weigth: 2}"))
    with pytest.raises(ConfigError, match=r"optim\.lr_factors\.norm\.weight: given 0; allowed: .* > 0"):
        check(load("optim.lr_factors={norm.weight: 0}"))


@pytest.mark.parametrize("value", ["[]", "none", "3"])
def test_a_stage_that_trains_nothing_is_refused(load: Load, value: str) -> None:
    with pytest.raises(ConfigError, match=r"stages\[1\]\.trainable: .*allowed: all \| non-empty list of text"):
        load(f"stages.1.trainable={value}")
