"""What can be seen of a layer with states (`statistics.STATES`).

Shape suffixes: n rows, N states, H query heads, d head width.
"""

import torch
from torch import Tensor

from moba_train.attention.statistics import Statistics, joined


def state_statistics(states_NHdd: Tensor, log_decay_x: Tensor, out_nHd: Tensor) -> Statistics:
    """The statistics of states, of logarithms of decays of any shape, and of outputs before their norm."""
    decay_x = log_decay_x.exp()
    decays = {"min_decay": decay_x.min().item(), "max_decay": decay_x.max().item()} if decay_x.numel() else {}
    norms = ("state_norm", torch.linalg.matrix_norm(states_NHdd)), ("output_norm", out_nHd.float().norm(dim=-1))
    return joined([Statistics(decays), *(_mean_and_largest(name, norm_xH) for name, norm_xH in norms)])


def _mean_and_largest(name: str, values: Tensor) -> Statistics:
    if not values.numel():
        return Statistics()
    return Statistics({name: values.mean().item(), f"max_{name}": values.max().item()}, values.numel())
