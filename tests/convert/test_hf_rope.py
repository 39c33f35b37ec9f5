"""Rotary embeddings go to a `config.json` and back without a change."""

import pytest

from moba_train.config.model import RopeConfig
from moba_train.convert.hf_rope import hf_length, hf_rope, read_rope

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
    read = read_rope(written)
    assert (read, read.fast_turns) == (rope.model_copy(update={"beta_fast": read.beta_fast}), rope.fast_turns)


@pytest.mark.parametrize(("trained", "written"), [(8192, 32768), (32768, 32768), (65536, 65536)])
def test_a_yarn_model_has_the_length_that_yarn_extends_it_to(trained: int, written: int) -> None:
    """transformers 4 divides it by the original length, and takes that for the factor; in the last case, of longer
    training, that is another one."""
    rope = RopeConfig(kind="yarn", theta=5e5, factor=4, original_seq_len=8192)
    assert hf_length(rope, trained) == written
    assert hf_length(RopeConfig(theta=5e5), trained) == trained
