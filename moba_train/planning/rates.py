"""Rates of an H200 in a training step, besides those of attention (attention_rates.py).

`benchmarks.step_time --fit` makes the fitted ones from the measured steps that it names, and shows how well all
others are predicted. The rest are single operations, in benchmarks/results: the loss of
loss-compare-h200-logits-once.json, `update_s` of optimizers-h200.json, `memory` of the copies of
context-parallel-h200.json.

Rates of another GPU are these, scaled by the data sheets: a guess until its steps are measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moba_train.config.attention import LayerAttention
from moba_train.parallel.context.costs import COPY_BANDWIDTH
from moba_train.planning.devices import H200, Gpu


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
