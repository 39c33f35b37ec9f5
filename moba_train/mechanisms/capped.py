"""The kind `capped`: softmax attention over capped scores, cap tanh(scores / cap) (Gemma 2, arXiv:2408.00118).

The cap acts on each score before the softmax, so partial results merge by (out, lse) as those of any softmax do. No
kernel here has it. On a GPU it is plain PyTorch as well, which makes all scores of a chunk of queries, and takes
several times as long as full attention's kernels.
"""

from pydantic import Field

from moba_train.attention.kind import AttentionKind, KindFacts
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Length, Section
from moba_train.mechanisms.window import WindowAttention, WindowKind

_ALL = 1 << 62
"""Window of a layer that attends to all tokens before."""


class CappedKind(WindowKind):
    """Attention to all tokens before, or to a window of them, whose scores stay below a cap. It costs what it does
    without the cap."""

    name = "capped"
    facts = KindFacts(frozenset(), takes_sink=True)

    class Options(Section):
        """Options of `kind: capped`. It runs in plain PyTorch, on a GPU as well: no kernel has it."""

        cap: float = Field(50.0, gt=0, description="scores become cap tanh(scores / cap)")
        window: Length | None = Field(
            None, description="last tokens of its document that a query attends to, its own included; null: all"
        )

    @classmethod
    def full_attention(cls, options: Options, keep_windows: bool = False) -> LayerAttention:
        """Capped scores of every earlier key, or itself."""
        return LayerAttention(cls.name, options if keep_windows else options.model_copy(update={"window": None}))

    def __init__(self, options: Options, head_dim: int) -> None:
        AttentionKind.__init__(self, options, head_dim)
        self.window = options.window or _ALL
        self.sinks = 0
        attention = WindowAttention(self.window, head_dim, "reference", cap=options.cap)
        exchange = attention.facts.exchange if options.window else None
        attention.facts = attention.facts._replace(work_grows=options.window is None, exchange=exchange)
        self.attentions = (attention,)
