"""Entry `moba` of an exported config.json: how each layer attends, and how new tokens do."""

from dataclasses import dataclass, fields
from typing import Any

DECODE = ("full", "own")
"""Attention of new tokens: to all tokens before, as in MoBA's paper, or as their layer attends to a prompt."""


@dataclass(frozen=True)
class Moba:
    """Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189): a query's own block, and the earlier blocks whose
    mean keys fit it best."""

    block_size: int
    """Tokens of a block, counted from a text's first token."""
    topk: int
    """Blocks of a query, its own included."""
    select: str = "head"
    """`head`: each query head selects; `group`: those that share a key/value head select together."""
    always: tuple[str, ...] = ("current",)
    """Blocks that are selected in any case, and count towards `topk`: `current`, `previous`, `first`."""
    key_conv: int = 0
    """Not 0: a convolution of the keys, which has parameters and is not known here."""

    def __post_init__(self) -> None:
        allowed = {
            "block_size": self.block_size >= 1,
            "topk": self.topk >= len({"current", *self.always}),
            "select": self.select in ("head", "group"),
            "always": {*self.always} <= {"current", "previous", "first"},
            "key_conv": self.key_conv == 0,
        }
        for name, fits in allowed.items():
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which this plugin does not know")


@dataclass(frozen=True)
class Window:
    """The last tokens before a query, and the first ones of the text."""

    window: int
    """Tokens of the window, the query's own included."""
    sinks: int = 0
    """First tokens of a text that all of it attends to."""


KINDS: dict[str, type[Moba] | type[Window]] = {"moba": Moba, "window": Window}


def layer_attention(config: Any, layer: int) -> Moba | Window | None:
    """Attention of a layer, by its number in the model; None: full attention, vLLM's own.

    config: of the exported model; one without `moba` is not ours.

    Raises ValueError for an entry that this plugin cannot run, rather than run another model.
    """
    layers = (getattr(config, "moba", None) or {}).get("layers", [])
    entry = dict(layers[layer]) if layer < len(layers) else {"kind": "full"}
    kind = entry.pop("kind", None)
    where = f"config.json: moba.layers[{layer}]"
    if kind == "full" and not entry:
        return None
    if kind not in KINDS:
        raise ValueError(f"{where}: kind {kind!r} given; the vLLM plugin knows full, {', '.join(KINDS)}")
    known = {field.name for field in fields(KINDS[kind])}
    if entry.keys() - known:
        raise ValueError(
            f"{where}: {min(entry.keys() - known)!r} given; kind {kind!r} knows {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {name: tuple(value) if name == "always" else value for name, value in entry.items()}
    try:
        return KINDS[kind](**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def decode_mode(config: Any) -> str:
    """`moba_decode` of the config, one of `DECODE`."""
    mode = str(getattr(config, "moba_decode", DECODE[0]))
    if mode not in DECODE:
        raise ValueError(f"moba_decode: {mode!r} given, allowed: {', '.join(DECODE)}")
    return mode
