"""The kind `full`: dense causal attention."""

from collections.abc import Iterator, Sequence

from moba_train.attention.full import FullAttention
from moba_train.attention.kind import AttentionKind, StageContext
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig

_DEVICES = {"flash4": "cuda", "cudnn": "cuda", "flash": "cuda", "flash2": "cuda", "sdpa": "cpu"}
"""The device that a backend needs."""


class FullKind(AttentionKind):
    """Every query attends to all earlier tokens of its document and to itself."""

    name = "full"
    Options = FullAttention.Options

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (FullAttention(options, head_dim),)

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """A backend that is not reproducible in a deterministic run, or not for the run's device."""
        assert isinstance(options, FullAttention.Options)
        if context.deterministic and options.backend == "cudnn":
            yield (
                f"backend: given 'cudnn' {context.layers}, whose backward pass is not reproducible, with "
                "deterministic: true; set auto or flash"
            )
        needs = _DEVICES.get(options.backend)
        if needs and context.device not in (None, needs):
            yield (
                f"backend: given {options.backend!r} {context.layers}, which runs on {needs} only; the run trains on "
                f"{context.device}; set auto"
            )

    def workspace_bytes(self, model: ModelConfig, width: int) -> int:
        """Flash kernels sum the gradients of queries in float32."""
        return 4 * model.heads * model.head_width

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """Half of each document's square."""
        return sum(length**2 for length in lengths) / 2
