"""Rates of a GPU in a training step, read from a JSON file.

`moba-train calibrate` measures them on the GPU of this machine. The package ships those of an H200 (h200.json names
their sources) and scales them to other GPUs by the data sheets. benchmarks/measured/planning.md says how a step's time
follows from them.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from moba_train.config.attention import LayerAttention
from moba_train.config.base import SAVED
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError, PlanError
from moba_train.foreign_files import read_foreign
from moba_train.memory.devices import GPUS_BY_NAME, H200, Gpu, known_gpu
from moba_train.memory.flops import layer_flops
from moba_train.parallel.links import LINKS, Links

MEASURED_MODEL = ModelConfig(
    vocab_size=2, hidden_size=2048, intermediate_size=1, layers=1, heads=32, kv_heads=8, head_dim=64
)
"""The layer whose attention `MeasuredLayer` is about; its head width is that of the row."""
CALIBRATE = "`moba-train calibrate --output rates.json` measures them on such a GPU, --rates rates.json uses them"

_SHIPPED = Path(__file__).parent / "h200.json"
_MOST_BYTES = 1 << 20


def named_gpu(name: str) -> Gpu:
    """The GPU of the table with this name, such as `h200` or `h100-nvl`. Raises ConfigError for an unknown name."""
    if gpu := GPUS_BY_NAME.get(name.lower().replace(" ", "-")):
        return gpu
    close = difflib.get_close_matches(name.lower(), GPUS_BY_NAME, n=1)
    closest = f"closest: {close[0]}; " if close else ""
    raise ConfigError([f"--gpu: given {name!r}; {closest}allowed: {', '.join(sorted(GPUS_BY_NAME))}"])


class _Measured(BaseModel):
    """A part of the file: unknown keys, and numbers that are not finite, are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MeasuredLayer(_Measured):
    """Milliseconds of the attention of one layer with 32 query and 8 key/value heads in bf16, on one document."""

    kind: str
    options: Mapping[str, int | str]
    """Options that distinguish the rows of a kind."""
    head_dim: PositiveInt
    tokens: PositiveInt
    forward_ms: PositiveFloat
    both_ms: PositiveFloat
    """Forward and backward."""


class AttentionRate(NamedTuple):
    """Operations per second of a layer's attention, measured alone."""

    forward: float
    both: float
    """Forward and backward together."""


class Rates(_Measured):
    """Rates of one GPU, per second unless said otherwise."""

    format: Literal[1]
    gpu: str
    """Name, as CUDA reports it or as in memory/devices.py."""
    gpu_memory: PositiveFloat
    """Bytes."""
    note: str
    """Origin of the rates in a few words, printed with every prediction."""
    sources: Mapping[str, str]
    """Origin of the numbers, by the keys or attention kinds that it is about."""
    products: PositiveFloat
    """Operations of bf16 matrix products with weights."""
    float8_products: PositiveFloat | None
    """Operations of FP8 matrix products, with the scaling and casting of their inputs; None: not measured."""
    memory: PositiveFloat
    """Bytes of the GPU's memory that are read and written."""
    compiled_passes: PositiveFloat
    """Number of times that compiled blocks read or write the bytes of their activations, forward and backward."""
    eager_passes: PositiveFloat
    """The number for blocks that are not compiled."""
    float8_weight_bytes: PositiveFloat
    """Bytes read and written for each weight of a block that is scaled, cast and gathered in FP8."""
    compiled_loss_bytes: PositiveFloat
    """Bytes read and written for a logit, forward and backward, if the loss is compiled."""
    eager_loss_bytes: PositiveFloat
    """Bytes read and written for a logit if the loss is not compiled."""
    attention_in_step: PositiveFloat
    """Speed of attention in a step, where the GPU is at its power limit, relative to its rates measured alone."""
    update_s: Mapping[str, PositiveFloat]
    """Seconds of an optimizer's step for each parameter of the rank, by `optim.kind`."""
    node_bandwidth: PositiveFloat | None
    """Bytes that a GPU receives from the others of its node; None: not measured, an H200's are assumed."""
    attention: tuple[MeasuredLayer, ...]

    @property
    def device(self) -> Gpu:
        """The GPU, by its name or, if the table of GPUs does not have it, by its memory alone."""
        return known_gpu(self.gpu) or Gpu(self.gpu, None, self.gpu_memory)

    @property
    def told(self) -> str:
        """The rates, as a phrase to print."""
        return f"the rates of {self.gpu} ({self.note})"

    def links(self, network: float) -> Links:
        """Links of GPUs with adapters of `network` Gbit/s to other nodes."""
        return Links(self.node_bandwidth or LINKS.node, network * 1e9 / 8)

    def to_json(self) -> str:
        """Content of a file of rates: a line for each number, and for each layer."""
        head = self.model_dump(mode="json", exclude={"attention"})
        rows = ",\n".join(f"  {json.dumps(row.model_dump(mode='json'))}" for row in self.attention)
        return f'{json.dumps(head, indent=1)[:-2]},\n "attention": [\n{rows}\n ]\n}}\n'

    def attention_rate(self, layer: LayerAttention, head_dim: int, tokens: int) -> AttentionRate:
        """The rate of a layer with heads of this width in sequences of `tokens` tokens.

        It is that of the measured rows, of the layer's mode if there are any, whose options and head width are nearest,
        between two lengths interpolated over log(tokens), beyond them that of the nearest length. Raises PlanError for
        a kind that was not measured, and for rows with options that the kind does not have.
        """
        rows = [row for row in self.attention if row.kind == layer.kind]
        if not rows:
            known = ", ".join(dict.fromkeys(row.kind for row in self.attention))
            raise PlanError(
                f"attention kind {layer.kind!r} has no measured time on {self.gpu}, so no step with it can be "
                f"predicted; measured: {known}; {CALIBRATE}"
            )
        for row in rows:
            try:
                _measured(row, layer)
            except ValidationError as error:
                raise PlanError(
                    f"the rates of {self.gpu} have options that attention kind {layer.kind!r} does not take: "
                    f"{_first_problem(error)}; {CALIBRATE}"
                ) from None
        # What a gate's rates of one mode say of the other is off by up to 18 times.
        mode = getattr(layer.options, "mode", None)
        rows = [row for row in rows if getattr(_measured(row, layer).options, "mode", None) == mode] or rows
        names = {name for row in rows for name in row.options}
        nearest = min(rows, key=lambda row: _distance(row, layer, head_dim, names))
        rows = [row for row in rows if (row.options, row.head_dim) == (nearest.options, nearest.head_dim)]
        rows.sort(key=lambda row: row.tokens)
        below = next((row for row in reversed(rows) if row.tokens <= tokens), rows[0])
        above = next((row for row in rows if row.tokens >= tokens), rows[-1])
        share = math.log(tokens / below.tokens, above.tokens / below.tokens) if above.tokens > below.tokens else 0.0
        low, high = (_row_rate(row, layer) for row in (below, above))
        return AttentionRate(*(a + share * (b - a) for a, b in zip(low, high, strict=True)))


def _distance(row: MeasuredLayer, layer: LayerAttention, head_dim: int, names: Collection[str]) -> float:
    """Difference of a row from a layer in head width and the options `names`: 1 for each doubling, 0 counted as 1, and
    for each other word."""
    distance = abs(math.log2(row.head_dim / head_dim))
    measured = _measured(row, layer).options
    for name in names:
        given, value = getattr(layer.options, name), getattr(measured, name)
        distance += abs(math.log2(max(given, 1) / max(value, 1))) if isinstance(value, int) else given != value
    return distance


def _measured(row: MeasuredLayer, layer: LayerAttention) -> LayerAttention:
    """The layer that a row of `layer`'s kind is about. Raises ValidationError for other options than the kind's."""
    return LayerAttention(row.kind, type(layer.options).model_validate(row.options, context=SAVED))


def _row_rate(row: MeasuredLayer, layer: LayerAttention) -> AttentionRate:
    measured = _measured(row, layer)
    flops = layer_flops(MEASURED_MODEL.model_copy(update={"head_dim": row.head_dim}), measured, [row.tokens])
    return AttentionRate(flops / 3 / (row.forward_ms / 1e3), flops / (row.both_ms / 1e3))


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def read_rates(path: Path) -> Rates:
    """The rates in a file of `moba-train calibrate`. Raises PlanError for another file."""
    try:
        return Rates.model_validate_json(read_foreign(path, _MOST_BYTES))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else _first_problem(error)
        raise PlanError(f"--rates: {path} holds no rates: {reason}; {CALIBRATE}") from None


def shipped_rates(gpu: Gpu) -> Rates:
    """The rates of an H200, scaled to `gpu`; with a note as they are for one that is not in the table."""
    rates = read_rates(_SHIPPED)
    if (known := known_gpu(gpu.name)) is None:
        note = f"{rates.note}; those of {gpu.name} are not known: measure them by moba-train calibrate"
        return rates.model_copy(update={"note": note})
    return scaled(rates, known)


_BALANCED_BLOCK = 236
"""Keys of a MoBA block for which an H200's products take as long as its memory: of each row of the history, forward and
backward, 14 operations a key and element for 18 bytes an element (docs/explanation/kernels.md), at 790 TFLOP/s and 4.3
TB/s."""


def scaled(rates: Rates, gpu: Gpu) -> Rates:
    """Rates of an H200, scaled to another GPU: by its peak what multiplies matrices, by its memory what reads
    and writes.

    AdamW's step only reads and writes; Muon's multiplies matrices. Attention is bound by products, except MoBA's in
    small blocks, where reading and writing rows takes longer.
    """
    if gpu.name == rates.gpu:
        return rates
    peak = (gpu.tflops or H200.tflops or 1.0) / (H200.tflops or 1.0)
    bandwidth = (gpu.bandwidth or H200.bandwidth or 1.0) / (H200.bandwidth or 1.0)

    def row_on_gpu(row: MeasuredLayer) -> MeasuredLayer:
        speed = peak
        if row.kind == "moba":
            products_s = int(row.options["block_size"]) / _BALANCED_BLOCK
            speed = max(products_s, 1.0) / max(products_s / peak, 1 / bandwidth)
        times = {name: float(f"{getattr(row, name) / speed:.4g}") for name in ("forward_ms", "both_ms")}
        return row.model_copy(update=times)

    changes: dict[str, Any] = {
        "gpu": gpu.name,
        "gpu_memory": gpu.memory,
        "note": "scaled from an H200's by the data sheets, not measured",
        "sources": {"all": "h200.json"},
        "products": peak * rates.products,
        "float8_products": peak * (rates.float8_products or 0.0),
        "memory": bandwidth * rates.memory,
        "update_s": {name: s / (bandwidth if name == "adamw" else peak) for name, s in rates.update_s.items()},
        "attention": tuple(map(row_on_gpu, rates.attention)),
    }
    return rates.model_copy(update=changes)
