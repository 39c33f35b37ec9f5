"""Rotary embeddings go to a `config.json` and back without a change, and are read as transformers reads them."""

import copy
import math
from typing import Any

import pytest
import torch

from moba_train.config.model import RopeConfig
from moba_train.config.stages import merge_rope
from moba_train.errors import CheckpointError
from moba_train.model.rope import attention_factor, rope_cos_sin, rope_frequencies
from moba_train.tools.convert.hf_export import hf_length, hf_rope
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.rope import read_rope

DEFAULTS = Family.defaults | {"max_position_embeddings": 2048}

YARN = {"factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 24.0, "beta_slow": 2.0}
LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (RopeConfig(theta=5e5), None),
        (RopeConfig(kind="pi", theta=5e5, factor=4), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeConfig(kind="yarn", theta=5e5, factor=4, original_seq_len=8192, beta_fast=24, beta_slow=2),
            {"rope_type": "yarn", **YARN},
        ),
        (RopeConfig(kind="llama3", theta=5e5, factor=8, original_seq_len=8192), {"rope_type": "llama3", **LLAMA3}),
    ],
    ids=lambda value: value.kind if isinstance(value, RopeConfig) else "",
)
def test_a_config_says_what_the_recipe_does(rope: RopeConfig, scaling: dict[str, object] | None) -> None:
    written = hf_rope(rope)
    assert written == {"rope_theta": 5e5, "rope_scaling": scaling}
    read = read_rope(DEFAULTS | written)
    assert (read, read.fast_turns) == (rope.model_copy(update={"beta_fast": read.beta_fast}), rope.fast_turns)


@pytest.mark.parametrize(("trained", "written"), [(8192, 32768), (32768, 32768), (65536, 65536)])
def test_a_yarn_model_has_the_length_that_yarn_extends_it_to(trained: int, written: int) -> None:
    """transformers 4 divides it by the original length, and takes that for the factor; in the last case, of longer
    training, that is another one."""
    rope = RopeConfig(kind="yarn", theta=5e5, factor=4, original_seq_len=8192)
    assert hf_length(rope, trained) == written
    assert hf_length(RopeConfig(theta=5e5), trained) == trained


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 16.0, 32.0]}


@pytest.mark.parametrize("seq_len", [64, 65])
def test_longrope_takes_its_factors_by_the_length_of_a_runs_sequences(seq_len: int) -> None:
    """transformers takes them by the length of each input; a stage of training has one length."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    common: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512}
    scaling = LONGROPE | {"rope_theta": 5e5, "original_max_position_embeddings": 64}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**common, rope_parameters=scaling))
    cos, _ = theirs(torch.zeros(1, seq_len, 8), torch.arange(seq_len)[None])
    rope = merge_rope(read_rope(DEFAULTS | common | {"rope_parameters": scaling}), None, seq_len)
    own, _ = rope_cos_sin(torch.arange(seq_len), rope, 8)
    torch.testing.assert_close(own[:, 0], cos[0, :, :4], rtol=1e-5, atol=2e-5)
    assert attention_factor(rope) == pytest.approx(math.sqrt(1 + math.log(8) / math.log(64)))
    alone = RopeConfig(overrides={1: rope.model_dump(exclude={"overrides", "seq_len"})})
    assert merge_rope(alone, None, seq_len).by_layer(2)[1] == rope.by_layer(1)[0]
    assert hf_rope(rope)["rope_scaling"].items() >= {"rope_type": "longrope", "factor": 8.0}.items()


SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "beta_fast": None}},
        {"rope_scaling": SHORT_YARN | {"factor": None}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
        {"rope_scaling": SHORT_YARN, "original_max_position_embeddings": 32},
        {"rope_scaling": SHORT_YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": SHORT_YARN | {"factor": 1, "mscale": 2.0, "mscale_all_dim": 1.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_theta": 1e3},
    ],
    ids=[
        "length of the model",
        "length of the model, transformers 5",
        "factor by lengths",
        "length outside",
        "length outside and inside",
        "both sections",
        "factor 1",
        "two bases",
    ],
)
def test_keys_in_several_places_are_read_as_transformers_reads_them(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    common: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**common, **copy.deepcopy(config)))
    ours = read_rope(DEFAULTS | common | config)
    torch.testing.assert_close(rope_frequencies(ours, 8).float(), theirs.inv_freq)
    assert attention_factor(ours) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("linear", "rope_scaling is 'linear', allowed: an object"),
        (
            {"rope_type": ["yarn"]},
            r"rope_scaling\.rope_type is \['yarn'\], allowed: .*yarn, longrope, llama3",
        ),
        ({"rope_type": "linear"}, r"rope_scaling\.factor is missing"),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"'dynamic', allowed: .*llama3\. Its frequencies change with the length",
        ),
        ({"type": "longrope", "factor": 2.0}, r"rope_scaling\.short_factor is missing; rope_type longrope needs it"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope_scaling\.factor: given 0\.5; allowed: number >= 1"),
        ({**SHORT_YARN, "beta_fast": 0}, r"rope_scaling\.beta_fast: given 0; allowed: number > 0"),
        ({**SHORT_YARN, "rope_theta": 0}, r"rope_scaling\.rope_theta: given 0; allowed: number > 1"),
        ({**SHORT_YARN, "factor": 1, "attention_factor": 1.3}, r"attention_factor is 1\.3, allowed: 1\.0 or none"),
        ({**SHORT_YARN, "attention_factor": float("nan")}, "attention_factor is nan"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place_in_the_config(scaling: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_rope(DEFAULTS | {"rope_scaling": scaling})
