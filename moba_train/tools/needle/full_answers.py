"""Answers as in the MoBA paper (arXiv:2502.13189, section 3.3): a long text is read with each layer's own attention,
question and answer with full attention over all keys.

Shape suffixes: L rows given to a layer (padding included), n tokens among them, H query heads, d head width.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moba_train.attention.engine import Engine
from moba_train.attention.full.full_kind import KindAround
from moba_train.attention.kind import AttentionKind, LayerInput
from moba_train.attention.layout import Layout
from moba_train.attention.shard import Shard, padded
from moba_train.config.attention import LayerAttention
from moba_train.errors import UserError
from moba_train.evals.evaluation import EvaluationContext, EvaluationSetting, full_attention, without_full
from moba_train.mechanisms.by_group import NamedShard
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer

Answered = Callable[[Tensor], Tensor]
"""Bool [n] of tokens of the packed sequence, int64 [n]: True for those of question and answer."""


class _Apart(Engine):
    """A layer's engine for a second kind: its shards keep rows and states under names of their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.observers = engine.observers

    def __call__(self, *call: Any) -> tuple[Tensor, Tensor]:
        return self._engine(*call)

    def shard(self, layout: Layout) -> Shard:
        return NamedShard(self._engine.shard(layout), "answers")


class FullForSome(KindAround):
    """Full attention on the same weights for the tokens that `answered` says, a kind of one's own for the others. Both
    are computed for all tokens."""

    def __init__(self, own: AttentionKind, full: AttentionKind, answered: Answered) -> None:
        super().__init__(own)
        self._full = full
        self._answered = answered

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """[L, H, d], and the auxiliary loss of `own`."""
        own_LHd, auxiliary_L = self.own.mix(layer, parameters)
        full_LHd, _ = self._full.mix(layer._replace(engine=_Apart(layer.engine)), parameters)
        answered_n = self._answered(layer.engine.shard(layer.layout).layout.q_tokens)
        answered_L11 = padded(answered_n, len(own_LHd))[:, None, None]
        return torch.where(answered_L11, full_LHd, own_LHd), auxiliary_L


@contextmanager
def full_for(model: Transformer, answered: Answered) -> Iterator[None]:
    """Inside, the tokens that `answered` says attend to all keys. Compiled blocks run uncompiled there: they would be
    compiled again for each question. Windows stay: models with them are other models without. Raises UserError for
    kinds that have no full attention."""
    own = model.attention_kinds()
    layers = tuple(LayerAttention(kind.name, kind.options) for kind in own)
    full = full_attention(layers, keep_windows=True)
    if full is None:
        raise UserError(f"answer: given full, but {without_full(layers)}; allowed: own")
    others = build_attention(full, model.config.head_width)
    pairs = zip(own, others, [one == other for one, other in zip(layers, full, strict=True)], strict=True)
    model.set_attention([kind if same else FullForSome(kind, other, answered) for kind, other, same in pairs])
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attention(own)


def full_from(model: Transformer, first: int) -> AbstractContextManager[None]:
    """`full_for` the tokens from `first` on, in a sequence that begins with the text."""
    return full_for(model, lambda tokens_n: tokens_n >= first)


def answer_modes(context: EvaluationContext, answer: str) -> Iterator[tuple[str, bool]]:
    """Each attention of the context by name, and True if answers are to be given with full attention. With `answer`
    full, each one but full attention comes once more."""
    for name in context.each_attention():
        yield from modes_of(name, answer)


def modes_of(name: str, answer: str) -> list[tuple[str, bool]]:
    """The modes of one attention."""
    return [(name, False), *([(f"{name}, answers with full", True)] if answer == "full" and name != "full" else [])]


def answer_problems(answer: str, setting: EvaluationSetting, key: str) -> Iterator[str]:
    """Layers that have no full attention. `key` is that of the section."""
    if answer == "full" and (lacking := without_full(setting.stage.attention)):
        yield f"{key}.answer: given 'full', but {lacking}; allowed: own"
