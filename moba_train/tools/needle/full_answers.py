"""Answers as in the MoBA paper (arXiv:2502.13189, section 3.3): a long text is read with each layer's own attention,
question and answer with full attention over all keys.

Shape suffixes: L rows given to a layer (padding included), n tokens among them, H query heads, d head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from moba_train.attention.engine import Engine
from moba_train.attention.full import FullAttention
from moba_train.attention.full.full_kind import FullKind, KindAround
from moba_train.attention.kind import AttentionKind, LayerInput, TwoSublayers
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.shard import Shard, padded
from moba_train.errors import UserError
from moba_train.evals.evaluation import EvaluationContext, EvaluationSetting
from moba_train.mechanisms.window import WindowKind
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer

_KEPT = (FullKind, WindowKind)
"""Kinds that answer as they are: models with windows are other models without them."""
Answered = Callable[[Tensor], Tensor]
"""Bool [n] of tokens of the packed sequence, int64 [n]: True for those of question and answer."""


class _KeepsKeys(Engine):
    """A layer's engine that keeps the keys of its last call: a kind may change them before it attends (`key_conv`)."""

    k_LKd: Tensor | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.observers = engine.observers

    def __call__(
        self, q_LHd: Tensor, k_LKd: Tensor, v_LKd: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.k_LKd = k_LKd
        return self._engine(q_LHd, k_LKd, v_LKd, attention, layout, *sink)

    def shard(self, layout: Layout) -> Shard:
        return self._engine.shard(layout)


class FullForSome(KindAround):
    """Full attention for the tokens that `answered` says, a kind of one's own for the others. Both are computed for all
    tokens."""

    def __init__(self, own: AttentionKind, answered: Answered) -> None:
        super().__init__(own)
        self._full = FullAttention(FullAttention.Options(), own.head_dim)
        self._answered = answered

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """[L, H, d], and the auxiliary loss of `own`."""
        engine = _KeepsKeys(layer.engine)
        own_LHd, auxiliary_L = self.own.mix(layer._replace(engine=engine), parameters)
        q_LHd = layer.rotate(layer.q_THd)
        k_LKd = layer.rotate(layer.k_TKd) if engine.k_LKd is None else engine.k_LKd
        full_LHd, _ = layer.engine(q_LHd, k_LKd, layer.v_TKd, self._full, layer.layout, *layer.sink)
        answered_n = self._answered(layer.engine.shard(layer.layout).layout.q_tokens)
        answered_L11 = padded(answered_n, len(own_LHd))[:, None, None]
        return torch.where(answered_L11, full_LHd, own_LHd), auxiliary_L


@contextmanager
def full_for(model: Transformer, answered: Answered) -> Iterator[None]:
    """Inside, the tokens that `answered` says attend to all keys. Compiled blocks run uncompiled there: they would be
    compiled again for each question. Raises UserError for layers that cannot do so."""
    own = model.attention_kinds()
    if unable := _unable(own):
        raise UserError(f"answer: full attention cannot answer for layers of {unable}; allowed: own")
    model.set_attention([kind if isinstance(kind, _KEPT) else FullForSome(kind, answered) for kind in own])
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
    """Layers whose own attention full attention cannot replace for some tokens. `key` is that of the section."""
    if answer == "full":
        kinds = build_attention(setting.stage.attention, setting.model.head_width)
        if unable := _unable(kinds):
            yield f"{key}.answer: given 'full', but full attention cannot answer for layers of {unable}; allowed: own"


def _unable(kinds: Sequence[AttentionKind]) -> str:
    """Names of kinds that are not full attention as soon as they select everything."""
    unable = set()
    for kind in kinds:
        one = len(kind.attentions) == 1 and not isinstance(kind, TwoSublayers)
        if not (isinstance(kind, _KEPT) or (one and kind.attentions[0].facts.decodes_full)):
            unable.add(kind.name)
    return ", ".join(sorted(unable))
