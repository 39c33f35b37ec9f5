"""Rates of an H200 in a training step, besides those of attention (attention_rates.py).

`benchmarks.step_time --fit` makes the fitted ones from the measured steps that it names, and shows how well all
others are predicted. The rest are single operations: `loss_bytes` from benchmarks/results/loss-compare-h200.json,
`update_s` from optimizers-h200.json, `memory` from the copies of context-parallel-h200.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moba_train.parallel.context.costs import COPY_BANDWIDTH
from moba_train.planning.devices import H200, Gpu


@dataclass(frozen=True)
class Rates:
    """What one GPU does in a second, and what takes it so long."""

    products: float = 711e12
    """Operations of bf16 matrix products with weights in a second. Fitted."""
    compiled_passes: float = 11.5
    """How often compiled blocks read or write the bytes of their activations, forward and backward. Fitted."""
    eager_passes: float = 15.5
    """The same of blocks that are not compiled. Fitted."""
    float8_products: float = 970e12
    """Operations of FP8 matrix products, with the scaling and casting around them. From the only measured FP8 step."""
    memory: float = COPY_BANDWIDTH
    """Bytes that are read and written in a second."""
    loss_bytes: float = 74.0
    """Bytes read and written for a logit: forward, again, and backward."""
    update_s: Mapping[str, float] = field(default_factory=lambda: {"adamw": 10.3e-12, "muon": 98.6e-12})
    """Seconds of an optimizer's step for each parameter of the rank, by `optim.kind`."""
    attention: float = 1.0
    """Attention's rates in units of an H200's."""

    def scaled_to(self, gpu: Gpu) -> "Rates":
        """Those of another GPU, where products and attention are as much faster as its peak is higher: a guess."""
        scale = (gpu.tflops or H200.tflops or 1.0) / (H200.tflops or 1.0)
        return replace(
            self,
            products=scale * self.products,
            float8_products=scale * self.float8_products,
            attention=scale * self.attention,
        )


RATES = Rates()
