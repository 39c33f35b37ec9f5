"""Kernels with the interfaces of other packages' AdamW, for machines without the packages. They compute in float64."""

from typing import Any

import torch
from torch import Tensor


def adamw_update(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, corrections: tuple[float, float], *tensors: Tensor
) -> None:
    """AdamW's definition in float64; tensors: parameter, gradient and moments."""
    p, g, m, v = (tensor.double() for tensor in tensors)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
    for tensor, value in zip(tensors, (p - lr * (update + decay * p), g, m, v), strict=True):
        tensor.copy_(value)


def multi_tensor_adam(
    chunk: int, skip: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, decay: float,
) -> None:  # fmt: skip
    """The interface of apex's amp_C and of transformer_engine_torch."""
    assert (mode, bias_correction, int(skip)) == (1, 1, 0)
    assert chunk > 0
    for g, p, m, v in zip(*lists, strict=True):
        adamw_update(lr, beta1, beta2, eps, decay, (1 - beta1**step, 1 - beta2**step), p, g, m, v)


class StandInAdam:
    """The interface of deepspeed.ops.adam.DeepSpeedCPUAdam, which multiplies powers of beta up, in float32."""

    opt_id = 3

    def __init__(self, _parameters: Any, *, lr: float, betas: Any, eps: float, adamw_mode: bool) -> None:
        assert adamw_mode
        self.ds_opt_adam = self
        self.last = 0
        self.powers = torch.ones(2)

    def adam_update(
        self, opt_id: int, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, correct: bool,
        *tensors: Tensor,
    ) -> None:  # fmt: skip
        assert opt_id == self.opt_id
        assert correct
        betas = torch.tensor([beta1, beta2])
        if step == self.last + 1:
            self.powers = self.powers * betas
        elif step != self.last:
            self.powers = betas**step
        self.last = step
        if step:
            c1, c2 = (1 - self.powers).tolist()
            adamw_update(lr, beta1, beta2, eps, decay, (c1, c2), *tensors)
