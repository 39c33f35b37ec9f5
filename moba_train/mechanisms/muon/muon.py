"""Muon (Jordan et al. 2024) for the weights of the blocks' linear layers, AdamW for all other parameters.

The update of a matrix is its momentum with all singular values made about equal, which a Newton-Schulz iteration does
by matrix products alone (`orthogonalize`). Scaled by 0.2 sqrt(max(rows, columns)) it has the root mean square of
AdamW's, so both take the same learning rate and weight decay (Liu et al. 2025, Muon is Scalable for LLM Training,
arXiv:2502.16982, section 2.2).

Why not torch.optim.Muon: on DTensors each of its matrix products gathers or reduces once more, every rank computes all
matrices, and it computes in bf16 everywhere. Here a matrix is gathered once, by the rank that computes it
(`MatrixExchange`), in bf16 on a GPU and in its own dtype on a CPU, where a run then does not depend on the ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moba_train.config.base import Section
from moba_train.config.optim import OptimConfig
from moba_train.config.schema import RunConfig
from moba_train.mechanisms.muon.exchange import MatrixExchange
from moba_train.mechanisms.muon.qk_clip import clip, clip_problems
from moba_train.model.transformer import Transformer
from moba_train.optim.adamw import adamw_groups, build_torch_adamw
from moba_train.optim.gradients import local_part
from moba_train.optim.spec import ADAMW_STATE, OptimizerSpec, block_matrices, trained_parameters
from moba_train.torch_private import foreach_lerp, foreach_lerp_

MuonScale = Literal["match_rms_adamw", "original"]
"""Factor of Muon's update of a matrix; the names are those of torch.optim.Muon."""


class MuonConfig(Section):
    """Muon, for the weights of the blocks' linear layers; all other parameters are trained by AdamW with `betas` and
    `eps`. See docs/how-to/precision-and-optimizers.md."""

    not_here = {"nesterov": "gone: always true", "steps": "gone: always 5"}

    momentum: float = Field(0.95, ge=0, lt=1, description="decay of the running mean of gradients")
    scale: MuonScale = Field(
        "match_rms_adamw",
        description="factor of the update; match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that `lr` and "
        "`weight_decay` are those of AdamW (Moonshot AI 2025); original: sqrt(max(1, rows / columns))",
    )
    qk_clip: float | None = Field(
        None,
        gt=0,
        description="QK-clip of MuonClip: heads whose attention logits exceed it get smaller query projections, and "
        "smaller key projections unless heads share them, after the update; Kimi K2 had 100; null: never",
    )


STEPS = 5
"""Newton-Schulz iterations that orthogonalize a matrix."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the polynomial a s + b s^3 + c s^5 (Jordan et al. 2024, Muon). It takes singular values from (0, 1]
near 1 in few steps, but does not converge: five steps leave those above 0.006 between 0.68 and 1.14."""
_EPS = 1e-7
"""Least norm that a matrix is divided by: a matrix of zeros stays one."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """U f(S) V^T for `matrix` = U S V^T, [rows, columns], with f near 1; computed in the dtype of `matrix`. Of a stack
    [n, rows, columns], that of each matrix.

    f is STEPS times the polynomial of `COEFFICIENTS`, after S was divided by its norm. The products take
    STEPS * (4 short^2 long + 2 short^3) FLOPs, where short and long are the two sizes.
    """
    a, b, c = COEFFICIENTS
    # The Gram matrix is made of the shorter side, which costs least.
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    # In float32: rounded to bf16 the norm would be off by up to a part in 512.
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (x / norm.clamp(min=_EPS)).to(matrix.dtype)
    addmm = torch.baddbmm if x.dim() == 3 else torch.addmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """One optimizer with two rules: its first parameter group is updated by Muon, the others by `adamw`.

    Of a stack of matrices [n, rows, columns] each rank has whole ones, as FSDP and expert parallelism divide n, and
    updates them without any transfer.
    """

    def __init__(
        self,
        model: nn.Module,
        matrices: Sequence[nn.Parameter],
        adamw: AdamW,
        config: OptimConfig,
        group: dist.ProcessGroup | None,
    ) -> None:
        first = {"params": list(matrices), "weight_decay": config.weight_decay, "lr_factor": 1.0}
        super().__init__([first, *adamw.param_groups], {"lr": config.lr})
        options = config.options_of("muon")
        assert isinstance(options, MuonConfig)
        self._options = options
        self._model = model
        self._group = group
        self._exchange: MatrixExchange | None = None
        self._adamw = adamw
        self._adamw.state = self.state  # both rules keep their state in one place, which checkpoints read

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Update all parameters that have a gradient. Called on all ranks together; `closure` must be None."""
        assert closure is None
        self._adamw.step()
        group = self.param_groups[0]
        lr = group["lr"]
        decay = group["weight_decay"]
        matrices = [weight for weight in group["params"] if weight.dim() == 2]
        for weight in group["params"]:
            if weight.dim() == 3 and weight.grad is not None:
                self._step_stack(weight, lr, decay)
        if self._exchange is None:  # not earlier: FSDP moves shards until the first forward pass
            self._exchange = MatrixExchange(matrices, self._group)
        active = [index for index, matrix in enumerate(matrices) if matrix.grad is not None]
        rounds = _rounds(active, [matrix.shape for matrix in matrices], self._exchange.ranks)
        self._step_matrices(self._exchange, matrices, rounds, lr, decay)
        if self._options.qk_clip is not None:
            assert isinstance(self._model, Transformer)
            clip(self._model, self._model.largest_lse.over_ranks(), self._options.qk_clip)

    def _step_stack(self, stack: nn.Parameter, lr: float, decay: float) -> None:
        """Update this rank's matrices of a stack."""
        (update,) = self._updates([stack])
        shard = local_part(stack)
        if shard.numel():
            result = orthogonalize(update.to(_compute_dtype(update))).to(shard.dtype)
            shard.mul_(1 - lr * decay)
            shard.add_(result, alpha=-lr * update_scale(stack.shape[1:], self._options.scale))

    def _step_matrices(
        self, exchange: MatrixExchange, matrices: list[nn.Parameter], rounds: list[list[int]], lr: float, decay: float
    ) -> None:
        """Work through the rounds; while a round is computed, the next one is gathered and the last one scattered."""
        gather = self._gather(exchange, matrices, rounds[0]) if rounds else None
        finish: Callable[[], None] | None = None
        for round_, following in zip_longest(rounds, rounds[1:]):
            next_gather = self._gather(exchange, matrices, following) if following else None
            assert gather is not None
            whole = gather()
            result = None if whole is None else orthogonalize(whole)
            shard = local_part(matrices[round_[0]])
            scattered = exchange.scatter(round_, result, shard.new_empty(0, dtype=_compute_dtype(shard)))
            if finish is not None:
                finish()
            finish = _apply_later(scattered, [matrices[index] for index in round_], lr, decay, self._options.scale)
            gather = next_gather
        if finish is not None:
            finish()

    def _gather(
        self, exchange: MatrixExchange, matrices: list[nn.Parameter], round_: list[int]
    ) -> Callable[[], Tensor | None]:
        """Take the gradients of a round into their momentum, and begin to gather what is to be orthogonalized."""
        updates = self._updates([matrices[index] for index in round_])
        return exchange.gather(round_, [update.to(_compute_dtype(update)) for update in updates])

    def _updates(self, matrices: Sequence[nn.Parameter]) -> list[Tensor]:
        """Take the gradients into their momentum; this rank's parts of what is to be orthogonalized, Nesterov's."""
        momentum = self._options.momentum
        gradients = []
        means = []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix.grad)
            gradients.append(local_part(matrix.grad))
            means.append(local_part(state["momentum_buffer"]))
        # A running mean: the scale of the momentum vanishes in the orthogonalization.
        foreach_lerp_(means, gradients, 1 - momentum)
        return list(foreach_lerp(gradients, means, momentum))


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which a matrix is sent and orthogonalized."""
    return torch.bfloat16 if tensor.device.type == "cuda" else tensor.dtype


def _apply_later(
    scattered: Callable[[], list[Tensor]], matrices: list[nn.Parameter], lr: float, decay: float, scale: MuonScale
) -> Callable[[], None]:
    """A function that waits for the updates of a round and applies them."""

    @torch.no_grad()
    def apply() -> None:
        for matrix, update in zip(matrices, scattered(), strict=True):
            shard = local_part(matrix)
            shard.mul_(1 - lr * decay)
            shard.add_(update, alpha=-lr * update_scale(matrix.shape, scale))

    return apply


def update_scale(shape: Sequence[int], scale: MuonScale) -> float:
    """The factor of the update of a matrix [rows, columns]."""
    rows, columns = shape
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _rounds(active: Sequence[int], shapes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """The matrices to step, `ranks` at a time, those of equal cost together: the ranks of a round then end together."""

    def cost(index: int) -> int:
        short, long = sorted(shapes[index])
        return short * short * (2 * long + short)

    ordered = sorted(active, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]


def _build(model: nn.Module, config: OptimConfig, device: torch.device, group: dist.ProcessGroup | None) -> Optimizer:
    matrices = block_matrices(model)
    others = [(name, parameter) for name, parameter in trained_parameters(model) if name not in matrices]
    adamw = build_torch_adamw(adamw_groups(others, config), config, device)
    return Muon(model, list(matrices.values()), adamw, config, group)


def _problems(config: RunConfig) -> Iterator[str]:
    options = config.optim.options_of("muon")
    if config.optim.lr_factors:
        yield f"optim.lr_factors: given {config.optim.lr_factors} with kind muon; allowed: with kind adamw"
    if isinstance(options, MuonConfig) and options.qk_clip is not None:
        yield from clip_problems(config)


MUON = OptimizerSpec(_build, ADAMW_STATE, {"momentum_buffer": 4}, _problems, MuonConfig)
