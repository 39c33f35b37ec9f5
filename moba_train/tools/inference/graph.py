"""A new token's pass through the model as a CUDA graph: the host asks for all of its kernels at once.

What the host knows of a sequence's length, such as the number of tiles of keys, changes from unit to unit of tokens
(`CachePlan.unit`). So the first token of a unit runs as written, the second one is recorded, and those behind it repeat
the record; the last one, which completes summaries, runs as written again. The rest is read from tensors: the token,
its position, its row of the cache, and the rows of the sequence.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.model.block import Block
from moba_train.model.feed_forward import RegisteredFeedForward
from moba_train.model.transformer import Transformer
from moba_train.tools.inference.cache import CachePlan

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Records the launches of a call; returns what repeats them, and the tensor that then holds the call's result."""


def cuda_graph(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """`Record` by a CUDA graph, on the current device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


class RepeatedToken:
    """New tokens of one sequence, all but the first and the last of a unit by repeated launches."""

    def __init__(self, model: Transformer, plan: CachePlan, record: Record) -> None:
        """model: with the engines of `plan`. One with experts, which wait for the GPU, or with longrope, whose factors
        are copied to it, is never recorded."""
        self._model = model
        self._plan = plan
        self._record = record
        experts = any(isinstance(module, RegisteredFeedForward) for module in model.modules())
        factors = any(cast(Block, block).attention.rope.kind == "longrope" for block in model.blocks)
        self._on_the_device = not experts and not factors
        self._numbers = torch.zeros(3, dtype=torch.int64, device=plan.device)
        """The token, its position and its row of the cache."""
        self._recorded: tuple[Callable[[], object], Tensor, Tensor] | None = None
        """A call that repeats the launches, the logits [1, V], and the sequence's rows [1, 2] that all layers read."""

    def __call__(self, sequence: int, token: int) -> Tensor | None:
        """Logits [V] behind the new `token`, or None if the model must run as written for it."""
        plan = self._plan
        length = plan.lengths[sequence]
        # A sequence's first new token follows its prompt, and each other one a token whose layout it can take over.
        follows = plan.prompt is None and plan.running == (sequence,)
        if not (self._on_the_device and follows and plan.unit and 0 < length % plan.unit < plan.unit - 1):
            self._recorded = None
            return None
        numbers = self._numbers
        row = plan.starts[sequence] + length
        numbers.copy_(torch.tensor([token, length, row]), non_blocking=True)
        if self._recorded is None:
            plan.new_rows = numbers[2:]
            # Kept with the layout: the tensor that the layers have read for the token before.
            bounds_12 = CachedKeys(numbers, numbers, plan.ranges(), plan.layout, None).bounds()
            self._recorded = (*self._record(lambda: self._model(numbers[:1], numbers[1:2], plan.layout)), bounds_12)
        repeat, logits_1V, bounds_12 = self._recorded
        bounds_12[0, 1] = row + 1
        plan.lengths[sequence] += 1
        repeat()
        return logits_1V[0]
