"""The kind `moba_v1`: what a recipe, a plan and an export need to know about it."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moba_train.attention.kind import StageContext
from moba_train.attention.moba.attention import MobaAttention
from moba_train.attention.moba.kind import MobaKind
from moba_train.attention.moba_v1.attention import NO_TRITON_SUMS, SummedMoba
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig


class MobaV1Kind(MobaKind):
    """MoBA whose blocks have a softmax each: their results are added up, or weighted by the gates."""

    name = "moba_v1"

    class Options(MobaAttention.Options):
        """Options of `kind: moba_v1`."""

        merge: Literal["sum", "gate", "softmax"] = Field(
            "sum",
            description="how the results of a query's blocks become one; sum: added up; gate: own block plus the "
            "mean of the others, weighted by the softmax of their gates; softmax: one softmax over all keys, as moba",
        )

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Those of MoBA, and Triton kernels for sums, which do not exist."""
        assert isinstance(options, MobaV1Kind.Options)
        if options.backend == "triton" and options.merge != "softmax":
            yield f"backend: given 'triton' {context.layers} with merge: {options.merge}, {NO_TRITON_SUMS}"
            options = options.model_copy(update={"backend": "auto"})
        yield from super().problems(options, context)

    def saved_bytes(self, model: ModelConfig, seq_len: int) -> int:
        """The selected block ids and their inverse lists, int32 each, and the weights by gates, float32."""
        if self._merge != "softmax":
            seq_len = max(seq_len, self._topk * self._block_size + 1)  # short sequences select, too
        weights = 4 * model.heads * (self._topk - 1) if self._merge == "gate" else 0
        return super().saved_bytes(model, seq_len) + weights

    def _attention(self) -> MobaAttention:
        if self._merge == "softmax":
            return super()._attention()
        section = f"attention.{self.name}"
        return SummedMoba(self.options, self.head_dim, section=section, gated=self._merge == "gate")

    @property
    def _merge(self) -> str:
        assert isinstance(self.options, MobaV1Kind.Options)
        return self.options.merge
