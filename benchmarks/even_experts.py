"""The training program, in which tokens take the experts in turn: every expert gets equally many of each micro-batch.

    torchrun ... -m benchmarks.even_experts RECIPE.yaml

Routers of random weights send all tokens of a deep model to the same experts, and so to one or two of the ranks, which
no trained model does. The weights of a token's experts, and all gradients, are still the router's if its scores are a
softmax, as in Qwen3; a sigmoid of such logits is 1 and has no gradient. torchtitan's
`debug.moe_force_load_balance` chooses the same experts. Bases of random weights are known as to
`benchmarks.random_base`.
"""

import sys

import torch
from torch import Tensor

from benchmarks import random_base
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.mechanisms.experts.router import Router
from moba_train.registry import FEED_FORWARDS

_ADVANTAGE = 100.0
"""Added to the logits of the experts whose turn it is; those of untrained routers differ by less than 10."""


class EvenRouter(Router):
    """Token t takes the experts from number t `active` on, modulo their number."""

    active: int

    def forward(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Logits [T, E]."""
        logits_TE = super().forward(x_TD, weight_ED)
        tokens, experts = logits_TE.shape
        first_T1 = self.active * torch.arange(tokens, device=logits_TE.device)[:, None]
        distance_TE = (torch.arange(experts, device=logits_TE.device) - first_T1) % experts
        return logits_TE + _ADVANTAGE * (distance_TE < self.active)


class EvenMixture(MixtureOfExperts):
    """A mixture of experts with such a router."""

    def __init__(self, options: MoeOptions, model: ModelConfig) -> None:
        super().__init__(options, model)
        self.router = EvenRouter(model.hidden_size, options.experts, options.bias)
        self.router.active = options.active


def train(arguments: list[str]) -> int:
    """Train as one rank. Returns its exit code."""
    with FEED_FORWARDS.registered("moe", EvenMixture):
        return random_base.train(arguments)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
