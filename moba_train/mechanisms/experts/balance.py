"""Load of the experts: counted in each micro-batch, for the auxiliary loss, the biases and the metrics.

One object serves all layers of a model that have experts, so that torch.compile compiles a block once for all of them:
the operator that chooses experts (`router.choose`) finds it by its handle. A layer is known by its bias, whose memory
stays where it is. Nothing waits for the GPU.

The auxiliary loss of token t is coefficient * E * sum over experts e of f_e p_te, with f_e the share of the choices of
all counted tokens that are e, without gradient, and p_te the token's scores, normalised (Shazeer et al. 2017; as in
DeepSeek-V3, arXiv:2412.19437, section 2.1.2, it is the coefficient in balance). Its mean over the loss tokens of all
ranks is added to the loss.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.attention.handles import Handled
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.model.loss import LossTokens


class Balance(Handled):
    """Counts of a step, by layer."""

    def __init__(
        self,
        options: MoeOptions,
        groups: Sequence[dist.ProcessGroup] = (),
        tp: int = 1,
        tp_rank: int = 0,
    ) -> None:
        """groups: over which the counts of a micro-batch are summed for the auxiliary loss, one after the other; tp,
        tp_rank: ranks that share the rows, of which each counts an equal part, and this rank's number."""
        self.options = options
        self._groups = groups
        self._tp = tp
        self._tp_rank = tp_rank
        self.loss_tokens: LossTokens | None = None
        """Tokens with loss in the micro-batch, by row of this rank's part; None: nothing is counted."""
        self._counts: dict[int, Tensor] = {}

    def note(self, layer: int, probabilities_TE: Tensor, order_n: Tensor, ends_E: Tensor) -> Tensor:
        """Count a micro-batch of a layer, which is known by the address of its bias. Returns f_e, float32 [E]; zeros
        where nothing is counted.

        order: the choices, numbered token by token, sorted by expert; ends: where those of each expert end
        """
        if self.loss_tokens is None:
            return torch.zeros_like(ends_E, dtype=torch.float32)
        counted_T = self._counted(len(probabilities_TE))
        # Sums along the sorted choices, not additions to the experts': their order is fixed, and no size is read.
        so_far_n = counted_T[order_n // self.options.active].cumsum(0)
        until_E = torch.cat([so_far_n.new_zeros(1), so_far_n])[ends_E]
        counts_E = until_E.diff(prepend=until_E.new_zeros(1))
        entropy = (-torch.special.xlogy(probabilities_TE, probabilities_TE).sum(1) * counted_T).sum()
        found = torch.cat([counts_E.double(), entropy.double()[None], counted_T.sum().double()[None]])
        before = self._counts.get(layer)
        self._counts[layer] = found if before is None else before + found
        if not self.options.router.has_loss:
            return torch.zeros_like(counts_E, dtype=torch.float32)
        for group in self._groups:
            dist.all_reduce(counts_E, group=group)
        return counts_E.float() / counts_E.sum().clamp(min=1)

    def _counted(self, rows: int) -> Tensor:
        """1 for each of the rows that counts, else 0, int64 [rows]."""
        assert self.loss_tokens is not None
        _, rows_n, weights_n = self.loss_tokens
        counted_T = torch.zeros(rows, dtype=torch.int64, device=rows_n.device)
        own = counted_T.chunk(self._tp)[self._tp_rank]
        if self.options.router.counted == "all":
            own.fill_(1)
        else:
            own[rows_n] = (weights_n != 0).long()  # one row without loss stands for none
        return counted_T

    def forget(self) -> None:
        """Begin a step."""
        self._counts = {}

    def counts(self, layer: int) -> Tensor | None:
        """Counts of a layer's step on this rank, float64 [E + 2]: choices of each expert, sum of the entropies of the
        tokens' scores, number of tokens; None where nothing was counted."""
        return self._counts.get(layer)
