"""Rates of an H200 in a training step, besides those of attention (attention_rates.py).

`benchmarks.step_time --fit` makes the fitted ones from the measured steps that it names, and shows how well all
others are predicted. The rest are single operations, in benchmarks/results: the loss of
loss-compare-h200-logits-once.json, `update_s` of optimizers-h200.json, `memory` of the copies of
context-parallel-h200.json.

Rates of another GPU are these, scaled by the data sheets: a guess until its steps are measured.

Operations per second of each attention kind on an H200, from measured layers.

A rate is a kind's operations (`AttentionKind.flops`) over the measured time of one layer: 32 query heads, 8 key/value
heads, bf16, one document, one GPU. A layer's rate is that of the measured rows whose kind, options and head width are
nearest, between two lengths interpolated over log(tokens), beyond them that of the nearest length.

Sources, in benchmarks/results: `full` from full-attention-h200.json and attention-h200-877fb6e.json (`auto` stands for
flash-attn-4, which it takes where that is installed), `moba` from attention-h200-877fb6e.json, but of later kernels
512/3 and 128/8 up to 128K from attention-gradients-gathered-h200-again.json (forward: both passes without the backward
pass), 128K 512/8 from attention-gluon-h200.json and 32K 256/4 from attention-long-blocks-h200.json, all other kinds
from mechanisms-h200.json, whose times include the rotary embedding and the kind's own matrices. A test compares them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.errors import PlanError
from moba_train.memory.devices import H200, Gpu
from moba_train.memory.flops import layer_flops
from moba_train.parallel.context.costs import COPY_BANDWIDTH


@dataclass(frozen=True)
class Rates:
    """What one GPU does in a second, and what takes it so long."""

    products: float = 711e12
    """Operations of bf16 matrix products with weights in a second. Fitted."""
    compiled_passes: float = 8.65
    """How often compiled blocks read or write the bytes of their activations, forward and backward. Fitted."""
    eager_passes: float = 16.2
    """How often blocks that are not compiled read or write the bytes of their activations. Fitted."""
    float8_products: float = 1426e12
    """Operations of FP8 matrix products, with the scaling and casting of their inputs. Fitted."""
    float8_weight_bytes: float = 53.1
    """Bytes read and written for each weight of a block that is scaled, cast and gathered in FP8. Fitted."""
    attention: float = 0.905
    """How fast attention is in a step, where the GPU is at its power limit, relative to its rates measured alone.
    Fitted."""
    memory: float = COPY_BANDWIDTH
    """Bytes that are read and written in a second."""
    compiled_loss_bytes: float = 22.5
    """Bytes read and written for a logit, forward and backward, where the loss is compiled."""
    eager_loss_bytes: float = 54.5
    """Bytes read and written for a logit where the loss is not compiled."""
    update_s: Mapping[str, float] = field(default_factory=lambda: {"adamw": 10.3e-12, "muon": 98.6e-12})
    """Seconds of an optimizer's step for each parameter of the rank, by `optim.kind`."""
    peak: float = 1.0
    """Dense bf16 peak in units of an H200's."""

    def scaled_to(self, gpu: Gpu) -> "Rates":
        """Those of another GPU: by its peak what multiplies matrices, by its memory's bandwidth what reads and writes.

        AdamW's step only reads and writes; Muon's orthogonalises matrices, by products.
        """
        peak = (gpu.tflops or H200.tflops or 1.0) / (H200.tflops or 1.0)
        bandwidth = (gpu.bandwidth or H200.bandwidth or 1.0) / (H200.bandwidth or 1.0)
        return replace(
            self,
            products=peak * self.products,
            float8_products=peak * self.float8_products,
            memory=bandwidth * self.memory,
            update_s={name: s / (bandwidth if name == "adamw" else peak) for name, s in self.update_s.items()},
            peak=peak * self.peak,
        )

    def attention_speed(self, layer: LayerAttention) -> float:
        """How many times faster a layer's attention is in a step than alone on an H200.

        It is bound by matrix products, and so faster by the peak, except MoBA's in blocks below about `_BALANCED_BLOCK`
        keys, where reading and writing rows takes longer: the longer of both counts, on this GPU and on the H200. All
        other kinds are taken to be bound by products.
        """
        if layer.kind != "moba":
            return self.attention * self.peak
        products_s = layer.options.model_dump()["block_size"] / _BALANCED_BLOCK
        return self.attention * max(products_s, 1.0) / max(products_s / self.peak, COPY_BANDWIDTH / self.memory)


_BALANCED_BLOCK = 236
"""Keys of a MoBA block for which an H200's products take as long as its memory: of each row of the history, forward and
backward, 14 operations a key and element for 18 bytes an element (docs/kernels.md), at 790 TFLOP/s and 4.3 TB/s."""
RATES = Rates()


class MeasuredLayer(NamedTuple):
    """Milliseconds of one layer's attention."""

    kind: str
    options: Mapping[str, int | str]
    """Options that tell the rows of a kind apart."""
    head_dim: int
    tokens: int
    forward_ms: float
    both_ms: float
    """Forward and backward."""


def _full(tokens: int, head_dim: int, backend: str, forward_ms: float, both_ms: float) -> MeasuredLayer:
    return MeasuredLayer("full", {"backend": backend}, head_dim, tokens, forward_ms, both_ms)


def _blocks(
    kind: str, tokens: int, block_size: int, topk: int, forward_ms: float, both_ms: float, head_dim: int = 64
) -> MeasuredLayer:
    options = {"block_size": block_size, "topk": topk}
    return MeasuredLayer(kind, options, head_dim, tokens, forward_ms, both_ms)


def _gate(kind: str, mode: str, tokens: int, forward_ms: float, both_ms: float) -> MeasuredLayer:
    return MeasuredLayer(kind, {"mode": mode}, 64, tokens, forward_ms, both_ms)


def _other(kind: str, tokens: int, forward_ms: float, both_ms: float) -> MeasuredLayer:
    return MeasuredLayer(kind, {}, 64, tokens, forward_ms, both_ms)


MEASURED = (
    _full(8192, 128, "auto", 0.8413, 3.183),
    _full(32768, 128, "auto", 14.09, 56.58),
    _full(65536, 128, "auto", 58.89, 208.0),
    _full(131072, 128, "auto", 226.2, 813.9),
    _full(262144, 128, "auto", 921.3, 3252),
    _full(65536, 64, "auto", 36.41, 123.0),
    _full(131072, 64, "auto", 144.2, 482.1),
    _full(8192, 128, "cudnn", 0.8765, 3.601),
    _full(32768, 128, "cudnn", 13.69, 55.3),
    _full(65536, 128, "cudnn", 57.34, 218.9),
    _full(131072, 128, "cudnn", 248.0, 906.4),
    _full(262144, 128, "cudnn", 1059, 3678),
    _full(65536, 64, "cudnn", 38.07, 140.4),
    _full(131072, 64, "cudnn", 152.4, 569.0),
    _full(8192, 128, "flash", 1.719, 6.511),
    _full(32768, 128, "flash", 24.53, 93.78),
    _full(65536, 128, "flash", 98.74, 372.0),
    _full(65536, 64, "flash", 58.91, 210.3),
    _blocks("moba", 8192, 512, 3, 0.9247, 2.099, head_dim=128),
    _blocks("moba", 32768, 512, 3, 2.137, 6.711, head_dim=128),
    _blocks("moba", 131072, 512, 8, 25.22, 77.39, head_dim=128),
    _blocks("moba", 32768, 256, 4, 2.888, 7.006, head_dim=128),
    _blocks("moba", 32768, 128, 8, 4.403, 9.671, head_dim=128),
    _blocks("moba", 65536, 128, 8, 8.94, 19.43, head_dim=128),
    _blocks("moba", 131072, 128, 8, 19.11, 40.14, head_dim=128),
    _blocks("moba", 262144, 128, 8, 43.15, 91.12, head_dim=128),
    _blocks("moba", 1048576, 128, 8, 268.7, 461.7, head_dim=128),
    _blocks("moba", 131072, 4096, 12, 148.6, 559.6, head_dim=128),
    _blocks("moba", 262144, 4096, 12, 335.4, 1232, head_dim=128),
    _blocks("moba", 524288, 4096, 12, 713.3, 2608, head_dim=128),
    _blocks("moba", 1048576, 4096, 12, 1474, 5389, head_dim=128),
    _blocks("moba", 131072, 128, 8, 14.66, 31.14),
    _blocks("moba", 65536, 4096, 12, 42.15, 139.4),
    _blocks("moba_v1", 8192, 512, 3, 7.124, 14.8),
    _blocks("moba_v1", 32768, 512, 3, 12.35, 35.42),
    _blocks("moba_v1", 131072, 512, 3, 17.03, 66.46),
    _blocks("moba_v05", 8192, 512, 3, 9.133, 17.93),
    _blocks("moba_v05", 32768, 512, 3, 15.69, 41.63),
    _blocks("moba_v05", 131072, 512, 3, 24.71, 82.67),
    _other("nsa", 8192, 9.589, 14.8),
    _other("nsa", 32768, 15.29, 37.18),
    _other("nsa", 131072, 82.0, 185.3),
    _other("infllm_v2", 8192, 1.002, 3.096),
    _other("infllm_v2", 32768, 24.23, 65.36),
    _other("infllm_v2", 131072, 165.2, 371.6),
    _gate("seer", "sparse", 8192, 13.48, 19.71),
    _gate("seer", "sparse", 32768, 12.34, 30.21),
    _gate("seer", "sparse", 131072, 49.98, 119.5),
    _gate("seer", "warmup", 8192, 4.891, 8.916),
    _gate("seer", "warmup", 32768, 23.12, 51.3),
    _gate("seer", "warmup", 131072, 336.5, 760.4),
    _gate("msa", "sparse", 8192, 9.959, 14.24),
    _gate("msa", "sparse", 32768, 17.86, 32.88),
    _gate("msa", "sparse", 131072, 154.2, 212.1),
    _gate("msa", "warmup", 8192, 2.556, 7.034),
    _gate("msa", "warmup", 32768, 29.79, 87.01),
    _gate("msa", "warmup", 131072, 474.7, 1375),
    _other("moa", 8192, 7.956, 21.39),
    _other("moa", 32768, 22.1, 57.82),
    _other("moa", 131072, 55.66, 150.6),
    _other("lightning", 8192, 1.113, 3.788),
    _other("lightning", 32768, 1.54, 6.35),
    _other("lightning", 131072, 5.528, 21.02),
    _other("kda", 8192, 2.091, 6.894),
    _other("kda", 32768, 10.83, 35.02),
    _other("kda", 131072, 47.71, 145.1),
)


_MEASURED_MODEL = ModelConfig(
    vocab_size=2, hidden_size=2048, intermediate_size=1, layers=1, heads=32, kv_heads=8, head_dim=64
)


class AttentionRate(NamedTuple):
    """Operations per second of a layer's attention on one H200."""

    forward: float
    both: float
    """Forward and backward together."""


@cache
def attention_rate(layer: LayerAttention, head_dim: int, tokens: int) -> AttentionRate:
    """The rate of a layer with heads of this width in sequences of `tokens` tokens.

    MEASURED lists the lengths of a kind's rows in ascending order. Raises PlanError for a kind that was never measured.
    """
    rows = [row for row in MEASURED if row.kind == layer.kind]
    if not rows:
        raise PlanError(
            f"attention kind {layer.kind!r} has no measured time, so no step with it can be predicted; allowed: "
            f"{', '.join(dict.fromkeys(row.kind for row in MEASURED))}; `moba-train plan RECIPE --gpus N`, without "
            "--nodes, plans the others, too"
        )
    nearest = min(rows, key=lambda row: _distance(row, layer, head_dim))
    rows = [row for row in rows if (row.options, row.head_dim) == (nearest.options, nearest.head_dim)]
    below = next((row for row in reversed(rows) if row.tokens <= tokens), rows[0])
    above = next((row for row in rows if row.tokens >= tokens), rows[-1])
    share = math.log(tokens / below.tokens, above.tokens / below.tokens) if above.tokens > below.tokens else 0.0
    low, high = (_row_rate(row, layer) for row in (below, above))
    return AttentionRate(low.forward + share * (high.forward - low.forward), low.both + share * (high.both - low.both))


def _distance(row: MeasuredLayer, layer: LayerAttention, head_dim: int) -> float:
    """How much a row's options and head width differ from a layer's: 1 for each doubling, and for each other word."""
    distance = abs(math.log2(row.head_dim / head_dim))
    for name, value in row.options.items():
        given = getattr(layer.options, name)
        if isinstance(value, int):
            distance += abs(math.log2(given / value))
        else:
            distance += given != value
    return distance


def _row_rate(row: MeasuredLayer, layer: LayerAttention) -> AttentionRate:
    measured = LayerAttention(row.kind, layer.options.model_copy(update=dict(row.options)))
    flops = layer_flops(_MEASURED_MODEL.model_copy(update={"head_dim": row.head_dim}), measured, [row.tokens])
    return AttentionRate(flops / 3 / (row.forward_ms / 1e3), flops / (row.both_ms / 1e3))
