"""Families of published models: what the config.json of each says, as our `model` section, and names of its tensors.

A family is one class and one entry point of the group `moba_train.model_families`, whose name is its `model_type`.
Llama (also SmolLM2), Qwen2, Qwen3 and Granite are here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.registry import MODEL_FAMILIES
from moba_train.tools.hf.rope import ROPE_SECTIONS, TRAINED, read_rope, turning_fraction, unused_keys

T = TypeVar("T")

NO_FUNCTION = frozenset(
    {
        *("model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "moba"),
        *("attn_implementation", "_attn_implementation", "moba_decode"),
    }
)
"""Keys of config.json that say nothing of what the model computes of its tokens."""
CODE = ("architectures", "auto_map")
"""Keys of config.json that name the model's class and where its code is."""
OF_FAMILIES = ("window", "capped")
"""Attention kinds without parameters that layers of some families have."""
OF_ALL: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "quantization_config": None,
    "is_causal": True,
    "per_layer_config": None,
}
"""`Family.fixed` that hardly differ among families; transformers 5 reads the last two in all of its models."""
NUMBER = "{}"
"""Place in a name of theirs for the number of each tensor of a stack of ours."""
_LAYERS = "model.layers."
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(\w+)")


class Fused(NamedTuple):
    """Form of a tensor of theirs whose rows are those of one or more parameters of ours."""

    dim: int = 0
    """Dimension of ours that its rows are counted along."""
    groups: str | None = None
    """Key of config.json with the number of groups, each with some rows of each of ours: as many as rows, and these
    alternate; None: those of ours after each other."""
    transposed: bool = False
    """True if the last two dimensions of ours are the other way round."""
    single: bool = False
    """True if theirs has one more dimension of size 1, the second."""

    def theirs(self, of_ours: Sequence[T], single: T) -> tuple[T, ...]:
        """Values for the dimensions of ours, as theirs has them; `single`: for one of size 1."""
        first, *others = of_ours
        if self.single:
            return (first, single, *others)
        return (first, *reversed(others)) if self.transposed else (first, *others)

    def to_theirs(self, ours: Tensor) -> Tensor:
        """A tensor of ours with the dimensions of theirs."""
        turned = ours.mT if self.transposed else ours
        return turned.unsqueeze(1) if self.single else turned

    def to_ours(self, theirs: Tensor) -> Tensor:
        """A tensor of theirs with the dimensions of ours."""
        turned = theirs.mT if self.transposed else theirs
        return turned.squeeze(1) if self.single else turned


class Family:
    """A model_type of transformers. The defaults are Llama's, which most families differ from in some values. The
    docstring of a family names its models."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    same: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "init_std": "initializer_range",
        "tie_embeddings": "tie_word_embeddings",
    }
    """Our keys, and those of config.json with equal values."""
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    """Values that transformers gives to keys which a config.json leaves out; None: no value. Sizes have none, as
    transformers writes them all; of `Llama` one."""
    model: ClassVar[dict[str, Any]] = {}
    """Values of our `model` that all of the family have."""
    fixed: ClassVar[dict[str, Any]] = OF_ALL | {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
    """Keys of config.json that must have these values: our Transformer implements no others."""
    left_aside: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that the model is one without."""
    windows: ClassVar[bool] = False
    """True if `layer_types` may name layers with a sliding window."""
    turning: ClassVar[float | None] = None
    """Part of each head that turns, where a config may say it and does not; None: all of it, always."""
    pattern: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Types of the first layers, which repeat, where the config has no `layer_types`."""
    needs_code: ClassVar[bool] = False
    """True if transformers has no such model, so that its code must come from elsewhere."""
    asked_for: ClassVar[bool] = False
    """True if an export takes the family only where its caller names it."""
    own_ropes: ClassVar[bool] = False
    """True if `written` has all that a config says of rotary embeddings."""
    is_ours: ClassVar[bool] = False
    """True if its files have all that our checkpoints have: also buffers, such as the bias of the choice of experts,
    and parameters of the attention kinds in `moba.layers`."""
    heads_divide_width: ClassVar[bool] = True
    """True if transformers refuses models whose heads do not divide the hidden size."""
    others: ClassVar[frozenset[str]] = frozenset()
    """More keys that the family reads, or that have no effect in it."""
    names: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
    }
    """Our modules, outside and inside of a block, and theirs. A longer name, such as `attention.q_proj`, goes before
    its beginning, and one with the parameter's own, `attention.sink.weight`, has all of theirs; several of ours may be
    the rows of one of theirs, in the order of our parameters. One of ours is a stack of theirs whose names have numbers
    at `NUMBER`."""
    fused: ClassVar[dict[str, Fused]] = {}
    """Forms of their tensors by name inside of a block, where they are not the rows of ours after each other."""

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with the family's defaults for keys that it leaves out. Null counts as left out, except for
        numbers, where it is no value, or one that transformers refuses as well, and `is_causal`, where it takes it for
        false. Raises CheckpointError, naming the key, where one without a default is left out."""
        kept = {key for key, value in self.defaults.items() if type(value) in (int, float)} | {"is_causal"}
        found = self.defaults | {key: value for key, value in config.items() if value is not None or key in kept}
        if found.get("num_key_value_heads") is None:
            found["num_key_value_heads"] = found.get("num_attention_heads")
        for key in self.sizes():
            if found.get(key) is None:
                raise CheckpointError(f"{key} is missing, allowed: the value that this model has")
        return found

    def sizes(self) -> list[str]:
        """Keys that a config.json may not leave out."""
        return [key for key in (*self.same.values(), "max_position_embeddings") if key not in self.defaults]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Values of our `model` section. Raises CheckpointError, naming the key, for one that it cannot say.

        config: with the values that it leaves out, as `read_family` returns it
        """
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                raise CheckpointError(f"{key} is {given(config[key])}, allowed: {value!r}")
        found = {ours: config[theirs] for ours, theirs in self.same.items()}
        rope = read_rope(config, 1.0 if self.turning is None else turning_fraction(config, self.turning))
        return found | {"head_dim": config.get("head_dim"), "rope": rope} | self.model

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """`layer_types` of the config, or what transformers takes for them."""
        given_types = config.get("layer_types")
        found = self.usual_types(config) if given_types is None else given_types
        return found if isinstance(found, list) else [found]

    def usual_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Types of the layers of a config without `layer_types`: here, those of `pattern`."""
        return [self.pattern[layer % len(self.pattern)] for layer in range(config["num_hidden_layers"])]

    def attention(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Kind and options of each layer that does not attend to all tokens before; of the others an empty dict.

        Raises CheckpointError, naming the layer and the key, for attention that no kind has.
        """
        types = {"full_attention": dict[str, Any]()}
        if self.windows:
            types["sliding_attention"] = {"kind": "window", "window": config.get("sliding_window"), "sinks": 0}
        found = self.layer_types(config)
        for layer, name in enumerate(found):
            if name not in [*types]:
                raise CheckpointError(f"layer_types[{layer}] is {given(name)}, allowed: {', '.join(types)}")
            if name != "full_attention" and not isinstance(window := config.get("sliding_window"), int):
                raise CheckpointError(f"sliding_window is {given(window)}, but layer {layer} is {name}")
        if len(found) != config["num_hidden_layers"]:
            raise CheckpointError(f"layer_types has {len(found)} entries, allowed: one for each layer")
        return [types[name] for name in found]

    def cautions(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Conditions under which published code computes something else than we do of this config."""
        return iter(())

    def unread(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of a config.json that can be read which no one has read, sorted: also those of its rotary embedding, as
        `section.key`, its `layer_types` where the family goes by other keys, and a class that is not the family's."""
        read = {*self.defaults, *self.same.values(), *self.fixed, *self.others, *NO_FUNCTION}
        read |= {*ROPE_SECTIONS, TRAINED, "head_dim", "max_position_embeddings"}
        read |= {"sliding_window"} if self.windows else set()
        read |= {*CODE} if config.get("architectures") in (None, [self.architecture]) else set()
        read |= {"layer_types"} if config.get("layer_types") in (None, self.layer_types(config)) else set()
        found = {key for key, value in config.items() if key not in read and value is not None}
        return sorted(found.union(() if self.own_ropes else unused_keys(config, self.defaults["rope_theta"])))

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """More keys of an exported config.json than those of `same`, head_dim and RoPE. `attention`: of each layer, as
        the method of that name returns it."""
        found: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}
        if self.windows:
            windows = [layer.get("window") for layer in attention]
            kinds = ("full_attention", "sliding_attention")
            found["layer_types"] = [kinds[window is not None] for window in windows]
            # A family with a usual window needs one in transformers also where no layer has it.
            found["sliding_window"] = next(filter(None, windows), self.defaults.get("sliding_window"))
        return found

    def name(self, ours: str) -> str:
        """Name of the tensor that has our parameter. Raises KeyError when there is none."""
        if match := _BLOCK.fullmatch(ours):
            layer, part, last = match.groups()
            if own := self.names.get(f"{part}.{last}"):
                return f"{_LAYERS}{layer}.{own}"
            first, _, rest = part.partition(".")
            found = self.names.get(part) or f"{self.names[first]}{'.' * bool(rest)}{rest}"
            return f"{_LAYERS}{layer}.{found}.{last}"
        module, _, last = ours.rpartition(".")
        return f"{self.names[module]}.{last}"

    def fused_as(self, theirs: str) -> Fused:
        """Form of the tensor of this name."""
        inside = theirs.removeprefix(_LAYERS).partition(".")[2]
        return self.fused.get(inside, Fused()) if theirs.startswith(_LAYERS) else Fused()


class Llama(Family):
    """Llama 2 and 3, SmolLM2."""

    # transformers 4.28.0.dev0 wrote `max_sequence_length`, which no release reads: Llama 1 and models made of it.
    defaults = Family.defaults | {"max_position_embeddings": 2048}


class Qwen2(Family):
    """Qwen2 and Qwen2.5."""

    architecture = "Qwen2ForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 32,
    }
    model = {"qkv_bias": True}
    heads_divide_width = False
    others = frozenset({"sliding_window", "max_window_layers"})  # only read with use_sliding_window


class Qwen3(Qwen2):
    """Qwen3, dense."""

    architecture = "Qwen3ForCausalLM"
    defaults = Qwen2.defaults | {"head_dim": 128}
    model = {"qk_norm": True}


_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


class Granite(Family):
    """Dense Granite models."""

    architecture = "GraniteForCausalLM"
    same = Family.same | _GRANITE
    defaults = Family.defaults | dict.fromkeys(_GRANITE.values(), 1.0)
    heads_divide_width = False

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The factor on scores also where it is the usual one, which is not transformers' default."""
        scale = model.attention_scale or model.head_width**-0.5
        return super().written(model, attention) | {"attention_multiplier": scale}


def family_of(model_type: object) -> Family:
    """The family of a `model_type`. Raises CheckpointError when there is none."""
    if not isinstance(model_type, str) or model_type not in MODEL_FAMILIES:
        raise CheckpointError(f"model_type is {given(model_type)}, allowed: {', '.join(MODEL_FAMILIES)}")
    found: Family = MODEL_FAMILIES[model_type]()
    return found
