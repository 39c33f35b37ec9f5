"""Attention layer by layer, as a recipe writes it."""

from typing import Any

import pytest
from pydantic import ValidationError

from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.registry import KINDS
from moba_train.config.attention import AttentionConfig, merge_attention, resolve_layers
from moba_train.config.layers import layer_ids
from moba_train.errors import UserError
from moba_train.model.build import build_attention


def kinds(config: dict[str, Any], layers: int = 6) -> list[str]:
    return [layer.kind for layer in resolve_layers(AttentionConfig.model_validate(config), layers)]


@pytest.mark.parametrize(
    ("full_layers", "full"),
    [
        ("none", []),
        ("all", [0, 1, 2, 3, 4, 5]),
        ("last:1", [5]),
        ("last:3", [3, 4, 5]),
        ("last:6", [0, 1, 2, 3, 4, 5]),
        ("first:2", [0, 1]),
        ("every:1", [0, 1, 2, 3, 4, 5]),
        ("every:2", [1, 3, 5]),
        ("every:4", [3]),
        ([], []),
        ([0, 4], [0, 4]),
        ([4, 4], [4]),
    ],
)
def test_full_layers_names_the_layers_with_full_attention(full_layers: str | list[int], full: list[int]) -> None:
    assert layer_ids(full_layers, 6) == set(full)
    assert [i for i, kind in enumerate(kinds({"full_layers": full_layers})) if kind == "full"] == full


@pytest.mark.parametrize(
    "full_layers", ["last:0", "last:7", "last:-1", "every:7", "half", "last", "last:3 ", [6], [-1]]
)
def test_a_pattern_that_names_no_layers_of_the_model_is_refused(full_layers: str | list[int]) -> None:
    with pytest.raises((ValueError, UserError), match="full_layers"):
        kinds({"full_layers": full_layers})


def test_the_default_kind_is_any_registered_one() -> None:
    assert [kinds({"default": kind}, 2) for kind in KINDS] == [[kind, kind] for kind in KINDS]


def test_an_override_wins_over_full_layers_and_over_the_kinds_options() -> None:
    config = AttentionConfig.model_validate(
        {
            "full_layers": "last:2",
            "moba": {"block_size": 4096, "topk": 12},
            "overrides": {0: {"kind": "full"}, 1: {"block_size": 1024}, 3: {"kind": "moba", "topk": 5}},
        }
    )
    layers = resolve_layers(config, 4)
    assert [layer.kind for layer in layers] == ["full", "moba", "full", "moba"]
    assert layers[1].options == MobaKind.Options(block_size=1024, topk=12)
    assert layers[3].options == MobaKind.Options(block_size=4096, topk=5)


def test_options_of_an_inactive_kind_rest_until_a_stage_switches_to_it() -> None:
    over = {"overrides": {1: {"block_size": 64}}}
    full = resolve_layers(AttentionConfig.model_validate({"default": "full", **over}), 2)
    assert [layer.kind for layer in full] == ["full", "full"]
    moba = resolve_layers(AttentionConfig.model_validate({"default": "moba", **over}), 2)
    assert moba[1].options == MobaKind.Options(block_size=64)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"default": "sliding"}, "default.*sliding.*full.*moba"),
        ({"overrides": {6: {"kind": "full"}}}, "overrides.*6.*layers 0 to 5"),
        ({"overrides": {-1: {"kind": "full"}}}, "overrides.*-1"),
        ({"overrides": {2: {"kind": "sliding"}}}, "overrides.2.kind.*sliding"),
        ({"overrides": {2: {"blocksize": 64}}}, "overrides.2.*unknown option"),
        ({"overrides": {2: {"block_size": 0}}}, "block_size"),
    ],
)
def test_a_mistake_is_refused_by_the_key_that_holds_it(config: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, UserError), match=f"(?s){named}"):
        kinds(config)


def test_more_forced_blocks_than_topk_are_refused_not_dropped() -> None:
    config = AttentionConfig.model_validate({"moba": {"topk": 2, "always": ["previous", "first"]}})
    with pytest.raises(ValueError, match=r"always.*forces 3 blocks, topk is 2"):
        build_attention(resolve_layers(config, 1), 16)


@pytest.mark.parametrize("config", [{"moba": {"topk": 0}}, {"moba": {"blocks": 3}}, {"fulll_layers": "all"}])
def test_unknown_keys_and_bad_values_are_refused_while_loading(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AttentionConfig.model_validate(config)


def test_a_stage_changes_only_the_keys_it_sets() -> None:
    base = AttentionConfig.model_validate(
        {"default": "moba", "full_layers": "last:3", "moba": {"block_size": 4096, "topk": 12, "select": "group"}}
    )
    stage = AttentionConfig.model_validate({"moba": {"topk": 3}})
    merged: Any = merge_attention(base, stage)
    assert merged.full_layers == "last:3"
    assert merged.moba == MobaKind.Options(block_size=4096, topk=3, select="group")
    assert merge_attention(base, None) == base


def test_a_stage_may_set_a_key_back_to_its_default_value() -> None:
    """`none` is the default of full_layers, and yet a stage that says it overrules the recipe's `last:3`."""
    base = AttentionConfig.model_validate({"full_layers": "last:3", "moba": {"topk": 12}})
    stage = AttentionConfig.model_validate({"full_layers": "none", "moba": {"topk": 3}})
    merged: Any = merge_attention(base, stage)
    assert (merged.full_layers, merged.moba.topk) == ("none", 3)


def test_a_stage_replaces_the_overrides_as_a_whole() -> None:
    base = AttentionConfig.model_validate({"overrides": {0: {"kind": "full"}}})
    stage = AttentionConfig.model_validate({"overrides": {1: {"kind": "full"}}})
    assert [layer.kind for layer in resolve_layers(merge_attention(base, stage), 2)] == ["moba", "full"]


def test_every_resolved_layer_becomes_an_attention_object_with_its_own_options() -> None:
    config = AttentionConfig.model_validate(
        {"full_layers": [1], "moba": {"block_size": 32}, "overrides": {2: {"block_size": 8}}}
    )
    built = build_attention(resolve_layers(config, 3), 16)
    assert [type(kind) for kind in built] == [KINDS["moba"], KINDS["full"], KINDS["moba"]]
    assert [attention.facts.alignment for kind in built for attention in kind.attentions] == [32, 1, 8]
