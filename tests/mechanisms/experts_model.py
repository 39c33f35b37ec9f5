"""Small models with experts, and a mixture written token by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.mechanisms.experts.products import Projections

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
        if layer.router.bias is not None:
            logits_E = logits_E + layer.router.bias
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
            update_D = update_D + scores_E[expert] / whole * router.scale * _expert(layer, expert, x_D)
        if layer.shared is not None:
            gate = 1 if layer.shared_gate is None else (layer.shared_gate.weight @ x_D).sigmoid()
            update_D = update_D + gate * layer.shared(x_D)
        updates.append(update_D)
    return torch.stack(updates)


def _expert(layer: MixtureOfExperts, expert: int, x_D: Tensor) -> Tensor:
    """Result [D] of one expert for one token."""

    def linear(stack: Projections, x: Tensor) -> Tensor:
        return F.linear(x, stack.weight[expert], None if stack.bias is None else stack.bias[expert])

    gate = linear(layer.experts.gate_proj, x_D)
    up = linear(layer.experts.up_proj, x_D)
    limit = layer.options.clamp
    if limit is None:
        return linear(layer.experts.down_proj, F.silu(gate) * up)
    gate = torch.minimum(gate, torch.tensor(limit, dtype=gate.dtype))
    up = up.minimum(torch.tensor(limit, dtype=up.dtype)).maximum(torch.tensor(-limit, dtype=up.dtype))
    return linear(layer.experts.down_proj, (up + 1) * gate / (1 + torch.exp(-1.702 * gate)))


class LivingRows(TorchDispatchMode):
    """Counts, inside, the rows of living matrices in bf16 of the model's width that have more than `tokens` of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        """The most so far."""

    @property
    def now(self) -> int:
        """Rows that live now."""
        self._living = {key: found for key, found in self._living.items() if not found[0].expired()}
        return sum(rows for _, rows in self._living.values())

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), further: Any = None) -> Any:
        result = function(*arguments, **(further or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.dtype == torch.bfloat16 and x.shape[1:] == (HIDDEN,):
                storage = x.untyped_storage()
                if len(x) > self._tokens:
                    self._living.setdefault(storage._cdata, (StorageWeakRef(storage), len(x)))
        self.most = max(self.most, self.now)
        return result
