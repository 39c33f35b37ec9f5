"""Load of the experts: counted in each micro-batch, for the auxiliary loss, the biases and the metrics.

One object serves all layers of a model that have experts, so that torch.compile compiles a block once for all of them:
the operator that chooses experts (`router.choose`) finds it by its handle. A layer is known by its bias, whose memory
stays where it is. Nothing waits for the GPU.

The auxiliary loss of token t is coefficient * E * sum over experts e of f_e p_te, with f_e the share of the choices of
all counted tokens that are e, without gradient, and p_te the token's scores, normalised (Shazeer et al. 2017; as in
DeepSeek-V3, arXiv:2412.19437, section 2.1.2, it is the coefficient in balance). The counted tokens are those of its
sequence, or of all. Its mean over the loss tokens of all ranks is added to the loss.

Shape suffixes: T tokens, E experts, S sequences whose loads differ, n choices.
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
        sequences: int = 1,
    ) -> None:
        """groups: over which the counts of a micro-batch are summed for the auxiliary loss, one after the other; tp,
        tp_rank: ranks that share the rows, of which each counts an equal part, and this rank's number; sequences: of a
        micro-batch."""
        self.options = options
        self._groups = groups
        self._tp = tp
        self._tp_rank = tp_rank
        self.sequences = sequences if options.router.aux_loss_over == "sequence" else 1
        """Sequences whose loads differ."""
        self.sequence_T: Tensor | None = None
        """Sequence of each row of a micro-batch that trains, int64 [T]; None: there is one."""
        self.loss_tokens: LossTokens | None = None
        """Tokens with loss in the micro-batch, by row of this rank's part; None: nothing is counted."""
        self._counts: dict[int, Tensor] = {}

    def note(self, layer: int, probabilities_TE: Tensor, sorted_n: Tensor, order_n: Tensor) -> tuple[Tensor, Tensor]:
        """Count a micro-batch of a layer, which is known by the address of its bias. Returns f_e of each sequence,
        float32 [S, E], zeros where nothing is counted, and the sequence of each row, int64 [T].

        sorted, order: experts of the choices, ascending, and their numbers, token by token
        """
        rows, experts = probabilities_TE.shape
        sequence_T = order_n.new_zeros(rows)
        load_SE = torch.zeros(self.sequences, experts, device=order_n.device)
        if self.loss_tokens is None:
            return load_SE, sequence_T
        counted_T = self._counted(rows)
        tokens_n = order_n // self.options.active
        if self.sequences > 1 and self.sequence_T is not None:
            sequence_T.copy_(self.sequence_T)
            sorted_n, further_n = (sorted_n * self.sequences + sequence_T[tokens_n]).sort(stable=True)
            tokens_n = tokens_n[further_n]
        # Sums along the sorted choices, not additions to the experts': their order is fixed, and no size is read.
        so_far_n = counted_T[tokens_n].cumsum(0)
        ends_ES = torch.searchsorted(sorted_n, torch.arange(load_SE.numel(), device=order_n.device), right=True)
        until_ES = torch.cat([so_far_n.new_zeros(1), so_far_n])[ends_ES]
        counts_SE = until_ES.diff(prepend=until_ES.new_zeros(1)).view(experts, self.sequences).T.contiguous()
        entropy = (-torch.special.xlogy(probabilities_TE, probabilities_TE).sum(1) * counted_T).sum()
        found = torch.cat([counts_SE.sum(0).double(), entropy.double()[None], counted_T.sum().double()[None]])
        before = self._counts.get(layer)
        self._counts[layer] = found if before is None else before + found
        if self.options.router.has_loss:
            for group in self._groups:
                dist.all_reduce(counts_SE, group=group)
            load_SE = counts_SE.float() / counts_SE.sum(1, keepdim=True).clamp(min=1)
        return load_SE, sequence_T

    def _counted(self, rows: int) -> Tensor:
        """1 for each of the rows that counts, else 0, int64 [rows]."""
        assert self.loss_tokens is not None
        _, rows_n, weights_n = self.loss_tokens
        counted_T = torch.zeros(rows, dtype=torch.int64, device=rows_n.device)
        own = counted_T.chunk(self._tp)[self._tp_rank]
        own[rows_n] = (weights_n != 0).long()  # one row without loss stands for none
        return counted_T

    def forget(self) -> None:
        """Begin a step."""
        self._counts = {}

    def counts(self, layer: int) -> Tensor | None:
        """Counts of a layer's step on this rank, float64 [E + 2]: choices of each expert, sum of the entropies of the
        tokens' scores, number of tokens; None where nothing was counted."""
        return self._counts.get(layer)
