"""Small models with experts, and a mixture written token by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.mechanisms.experts.options import MoeOptions

EXPERTS = 8
ACTIVE = 3
HIDDEN = 16
WIDTH = 24


def options(**given: Any) -> MoeOptions:
    """Eight experts of which three are active."""
    sizes = {"experts": EXPERTS, "active": ACTIVE, "intermediate_size": WIDTH}
    return MoeOptions.model_validate(sizes | given)


def mixture(given: MoeOptions, dtype: torch.dtype = torch.float32, seed: int = 0) -> MixtureOfExperts:
    """A layer with drawn weights."""
    shape = ModelConfig(vocab_size=2, hidden_size=HIDDEN, intermediate_size=1, layers=1, heads=1, kv_heads=1)
    layer = MixtureOfExperts(given, shape).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return layer


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def token_by_token(layer: MixtureOfExperts, x_TD: Tensor) -> Tensor:
    """The update of the layer by its definition, [T, D]."""
    router = layer.options.router
    updates = []
    for x_D in x_TD:
        logits_E = layer.router.weight @ x_D
        scores_E = logits_E.softmax(0) if router.score == "softmax" else logits_E.sigmoid()
        preferred_E = scores_E + layer.bias if router.has_bias else scores_E.clone()
        if router.groups is not None and router.active_groups is not None:
            size = len(preferred_E) // router.groups
            taken = min(size, 2 if router.score == "sigmoid" else 1)
            ranks = [group.sort(descending=True).values[:taken].sum() for group in preferred_E.split(size)]
            best = sorted(range(router.groups), key=lambda group: -ranks[group])[: router.active_groups]
            for group in set(range(router.groups)) - set(best):
                preferred_E[group * size : (group + 1) * size] = -torch.inf
        chosen = sorted(range(len(preferred_E)), key=lambda expert: -preferred_E[expert].item())[: layer.options.active]
        whole = sum(scores_E[expert] for expert in chosen) if router.normalize else 1
        update_D = torch.zeros_like(x_D)
        for expert in chosen:
            gate, up, down = (
                stack.weight[expert]
                for stack in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj)
            )
            update_D = update_D + scores_E[expert] / whole * router.scale * (down @ (F.silu(gate @ x_D) * (up @ x_D)))
        updates.append(update_D if layer.shared is None else update_D + layer.shared(x_D))
    return torch.stack(updates)
