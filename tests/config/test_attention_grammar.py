"""Which attention each layer gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.config.attention import AttentionConfig, full_layer_ids, merge_attention, resolve_layers
from moba_train.errors import ConfigError


def kinds(layers: int, **config) -> str:
    """One letter a layer: f for full, m for moba."""
    return "".join(layer.kind[0] for layer in resolve_layers(AttentionConfig.model_validate(config), layers))


@pytest.mark.parametrize(
    ("full_layers", "expected"),
    [
        ("none", "mmmmmm"),
        ("all", "ffffff"),
        ("last:2", "mmmmff"),
        ("first:1", "fmmmmm"),
        ("every:3", "mmfmmf"),
        ([0, 4], "fmmmfm"),
        ([], "mmmmmm"),
    ],
)
def test_full_layers(full_layers, expected):
    assert kinds(6, full_layers=full_layers) == expected


@pytest.mark.parametrize("full_layers", ["last:0", "last", "some", "last:7", [6], [-1], ""])
def test_layers_that_do_not_exist_are_refused(full_layers):
    with pytest.raises(ValueError, match=r"layer|is not one of"):
        full_layer_ids(full_layers, 6)


@given(layers=st.integers(1, 40), count=st.integers(1, 40))
def test_first_and_last_are_complements(layers, count):
    if count < layers:
        first = full_layer_ids(f"first:{count}", layers)
        assert first.isdisjoint(full_layer_ids(f"last:{layers - count}", layers))
        assert len(first) == count


def test_overrides_win_and_keep_the_other_options():
    config = AttentionConfig.model_validate(
        {
            "full_layers": "last:1",
            "moba": {"block_size": 64, "topk": 5},
            "overrides": {0: {"topk": 2}, 1: {"kind": "full", "block_size": 8}, 3: {"kind": "moba"}},
        }
    )
    layers = resolve_layers(config, 4)
    assert [layer.kind for layer in layers] == ["moba", "full", "moba", "moba"]
    assert (layers[0].options.topk, layers[0].options.block_size) == (2, 64)
    assert layers[2].options == layers[3].options == config.moba


def test_a_stage_changes_only_the_keys_it_sets():
    recipe = AttentionConfig.model_validate({"full_layers": "last:1", "moba": {"block_size": 64, "topk": 5}})
    stage = AttentionConfig.model_validate({"moba": {"topk": 2}})
    merged = merge_attention(recipe, stage)
    assert (merged.moba.block_size, merged.moba.topk, merged.full_layers) == (64, 2, "last:1")
    assert merge_attention(recipe, None) == recipe


def test_every_mistake_is_reported_at_once():
    config = AttentionConfig.model_validate(
        {"default": "mob", "full_layers": "x", "overrides": {0: {"kind": "y", "tokp": 1}, 1: {"topk": "z"}, 9: {}}}
    )
    with pytest.raises(ConfigError) as caught:
        resolve_layers(config, 4)
    found = [text.split(":")[0] for text in caught.value.problems]
    assert found == ["default", "full_layers", "overrides", "overrides.0.kind", "overrides.0.tokp"]
