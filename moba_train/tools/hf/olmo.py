"""OLMo 2 and 3 of the Allen Institute: norms behind attention and feed-forward, and over all heads of q and of k."""

from moba_train.tools.hf.family import Family
from moba_train.tools.hf.windowed import Windowed

_DEFAULTS = Family.defaults | {"rms_norm_eps": 1e-5}
_NAMES = {key: value for key, value in Family.names.items() if not key.endswith("_norm")} | {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
_MODEL = {"norms": "post", "qk_norm": "all_heads"}


class Olmo2(Family):
    """OLMo 2: all layers attend to all tokens before."""

    architecture = "Olmo2ForCausalLM"
    defaults = _DEFAULTS
    model = _MODEL
    names = _NAMES
    heads_divide_width = False


class Olmo3(Windowed):
    """OLMo 3: three of four layers have a window; others scale RoPE."""

    architecture = "Olmo3ForCausalLM"
    defaults = _DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0}
    model = _MODEL
    names = _NAMES
    full_every = 4
