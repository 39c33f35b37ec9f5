"""The shape of the Transformer."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from moba_train.config.base import Length, OpenSection, Section
from moba_train.config.explain import explain
from moba_train.config.layers import PATTERNS, LayerPattern, by_layer, layer_ids, plain_keys
from moba_train.registry import FEED_FORWARDS

MOST_LAYERS = 10_000
MOST_HEADS = 1 << 16
LARGEST_WIDTH = 1 << 24
"""Bounds far above any model. Without them the config of a downloaded model makes a program build layers for ever."""


class LayerRope(Section):
    """Rotary position embedding of a layer, see `RopeConfig`."""

    kind: Literal["none", "abf", "pi", "yarn", "llama3", "longrope", "nope"] = Field(
        "none", description="how the embedding is fitted to longer contexts"
    )
    theta: float = Field(10_000.0, gt=1, description="base of the rotary frequencies")
    factor: float = Field(
        1.0, ge=1, description="how far positions are stretched (pi, yarn, llama3, longrope): new / trained length"
    )
    original_seq_len: Length | None = Field(None, description="yarn, llama3, longrope: length trained before")
    beta_fast: float | None = Field(
        None, gt=0, description="turns in original_seq_len from which a frequency stays; null: 32 (yarn), 4 (llama3)"
    )
    beta_slow: float = Field(1.0, gt=0, description="turns in original_seq_len up to which a frequency is stretched")
    truncate: bool = Field(True, description="yarn: between the two lie whole frequencies; false: parts too (gpt-oss)")
    short_factors: tuple[PositiveFloat, ...] = Field(
        (), description="longrope: each frequency is divided by its factor, in sequences up to original_seq_len"
    )
    long_factors: tuple[PositiveFloat, ...] = Field((), description="longrope: the factors in longer sequences")
    seq_len: Length | None = Field(None, description="longrope: length of the sequences; null: the stage's")

    fraction: float = Field(1.0, gt=0, le=1, description="part of each head's dimensions that turns, the first ones")

    @property
    def fast_turns(self) -> float:
        """`beta_fast`, given or the kind's own."""
        return self.beta_fast if self.beta_fast is not None else {"llama3": 4.0}.get(self.kind, 32.0)


class RopeConfig(LayerRope):
    """Rotary position embedding. A stage may change it; the weights stay as they are.

    `none` uses `theta` as it is; `abf` (adjusted base frequency, Xiong et al. 2023, arXiv:2309.16039) raises `theta`;
    `pi` (position interpolation, Chen et al. 2023, arXiv:2306.15595) divides positions by `factor`. `yarn` (Peng et al.
    2023, arXiv:2309.00071) does so only for frequencies that turn less than `beta_slow` times in `original_seq_len`,
    not for those that turn more than `beta_fast` times, in between partly, and sharpens the attention. `llama3` is the
    same idea in Llama 3.1, without the sharpening; `beta_slow` and `beta_fast` are its low and high frequency factors.
    `longrope` (Ding et al. 2024, arXiv:2402.13753) divides each frequency by its own factor and sharpens the
    attention; there are two lists of factors, of which a stage takes one by the length of its sequences. `nope` turns
    nothing: no positional embedding (Kazemnejad et al. 2023, arXiv:2305.19466).
    """

    overrides: dict[int | str, dict[str, Any] | None] = Field(
        {},
        description="layer id or pattern, such as every:4 -> keys of rope with other values there: {kind: nope}; ids "
        "win over patterns, later patterns over earlier ones; null takes back what an extended recipe gives",
    )

    _plain_keys = field_validator("overrides", mode="before")(plain_keys)

    @field_validator("overrides")
    @classmethod
    def _check_keys(cls, overrides: dict[int | str, dict[str, Any] | None]) -> dict[int | str, dict[str, Any] | None]:
        problems: list[str] = []
        for layer, values in overrides.items():
            try:
                LayerRope.model_validate(values or {})
            except ValidationError as error:
                problems += [f"{layer}.{problem}" for problem in explain(error, LayerRope)]
        if problems:
            raise ValueError("; ".join(problems))
        return overrides

    def by_layer(self, layers: int) -> list[LayerRope]:
        """The embedding of every layer. Raises ValueError for a pattern that names no layers."""
        values = self.model_dump(exclude={"overrides"})
        found = [LayerRope.model_validate(values)] * layers
        for layer, own in by_layer(self.overrides, layers).items():
            found[layer] = LayerRope.model_validate(values | own)
        return found


class ModelConfig(OpenSection):
    """A Llama-style decoder. With `qkv_bias` it is Qwen2's, with `qk_norm` Qwen3's shape.

    Weights that a model has in some layers alone are named by patterns, as `attention.full_layers` is. The section of a
    registered feed-forward, such as `moe`, gives it to the layers that its `layers` names.
    """

    members = FEED_FORWARDS

    vocab_size: int = Field(ge=2, le=LARGEST_WIDTH, description="rows of the embedding; at least the tokenizer's size")
    hidden_size: int = Field(ge=2, le=LARGEST_WIDTH, description="width of the residual stream")
    intermediate_size: int = Field(ge=1, le=LARGEST_WIDTH, description="width of the SwiGLU feed-forward")
    layers: int = Field(ge=1, le=MOST_LAYERS, description="Transformer blocks")
    heads: int = Field(ge=1, le=MOST_HEADS, description="query heads")
    kv_heads: int = Field(ge=1, le=MOST_HEADS, description="key/value heads; divides `heads`")
    head_dim: int | None = Field(
        None, ge=2, le=LARGEST_WIDTH, description="width of one head; default hidden_size / heads"
    )
    rope: RopeConfig = RopeConfig()
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    tie_embeddings: bool = Field(False, description="share the embedding with the output projection")
    qk_norm: bool | Literal["all_heads"] = Field(
        False, description="RMSNorm over each query and key head (Qwen3); all_heads: over all of them at once (OLMo-2)"
    )
    qkv_bias: bool = Field(False, description="bias in the query, key and value projections (Qwen2)")
    o_bias: bool = Field(False, description="bias in the output projection of attention (gpt-oss)")
    norms: Literal["pre", "post", "both"] = Field(
        "pre", description="RMSNorm before attention and feed-forward (Llama), behind them (OLMo-2), both (Gemma)"
    )
    centered_norms: bool = Field(False, description="norms multiply by 1 + their weight, which begins at 0 (Gemma)")
    activation: Literal["silu", "gelu_tanh", "clamped"] = Field(
        "silu",
        description="of dense layers' gated feed-forward; clamped: min(gate, 7) sigmoid(1.702 gate) (up + 1), with up "
        "within +-7 (MiniMax-M3)",
    )
    embedding_scale: float = Field(1.0, gt=0, description="factor on embeddings")
    attention_scale: float | None = Field(None, gt=0, description="factor on scores; null: head_dim ** -0.5")
    residual_scale: float = Field(1.0, gt=0, description="factor on what attention and feed-forward add")
    logits_divisor: float = Field(1.0, gt=0, description="logits are divided by it (Granite)")
    logits_cap: float | None = Field(None, gt=0, description="logits become cap tanh(logits / cap) (Gemma 2)")
    sink_layers: LayerPattern = Field(
        "none", description=f"layers with a learned sink, a logit of each head without a value (gpt-oss): {PATTERNS}"
    )
    output_gate: Literal["head", "channel"] = Field(
        "channel", description="the sigmoid gate, a matrix of the layer's input: of each head, or of each of its values"
    )
    gate_layers: LayerPattern = Field(
        "none", description=f"layers whose attention's output is gated (Qwen3-Next): {PATTERNS}"
    )
    bare_layers: LayerPattern = Field(
        "none", description=f"layers without projections, whose attention kind has its own, such as gdn: {PATTERNS}"
    )
    init_std: float = Field(0.02, gt=0, description="standard deviation of the initial weights")

    @property
    def head_width(self) -> int:
        """Width of one attention head, given or derived."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.heads

    def is_bare(self, layer: int) -> bool:
        """True if a layer has no projections but those of its attention kind."""
        return layer in layer_ids(self.bare_layers, self.layers)

    def has_sink(self, layer: int) -> bool:
        """True if a layer's attention has a learned sink."""
        return layer in layer_ids(self.sink_layers, self.layers) and not self.is_bare(layer)

    def gates(self, layer: int) -> int:
        """Gates of a layer's attention; 0 without."""
        width = 1 if self.output_gate == "head" else self.head_width
        gated = layer in layer_ids(self.gate_layers, self.layers) and not self.is_bare(layer)
        return self.heads * width if gated else 0

    def feed_forward(self, layer: int) -> tuple[str, Section] | None:
        """Name and section of the layer's registered feed-forward; None: it has the model's own."""
        for name, options in self.given_members.items():
            if layer in layer_ids(options.layers, self.layers):  # type: ignore[attr-defined]  # every Options has
                return name, options
        return None

    @model_validator(mode="after")
    def _one_feed_forward_for_each_layer(self) -> Self:
        taken: dict[int, str] = {}
        for name, options in self.given_members.items():
            try:
                layers = layer_ids(options.layers, self.layers)  # type: ignore[attr-defined]  # every Options has
            except ValueError as error:
                raise ValueError(f"{name}.layers: {error}") from None
            if both := [layer for layer in layers if layer in taken]:
                raise ValueError(f"{name}.layers: layer {both[0]} has {taken[both[0]]!r} as well; allowed: one of them")
            taken |= dict.fromkeys(layers, name)
        return self
