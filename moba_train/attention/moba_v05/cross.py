"""The parameters of the second sublayer: a norm, and projections around cross attention.

Shape suffixes: T tokens, D hidden size, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.config.model import ModelConfig


class CrossAttention(nn.Module):
    """Norm, q, k, v and o of the shapes and kinds that the layer's own attention has."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.head_dim = width
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.q_proj = nn.Linear(model.hidden_size, model.heads * width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(model.heads * width, model.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x_TD: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The update [T, D] of the residual stream `x_TD`; `attend`: out [T, H, d] from q, k and v before RoPE.

        The normalised stream is not kept for the backward pass, which normalises again.
        """
        q_THd, k_TKd, v_TKd = checkpoint(self._project, x_TD, use_reentrant=False, preserve_rng_state=False)
        return self.o_proj(attend(q_THd, k_TKd, v_TKd).flatten(1))

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = self.norm(x_TD)
        q_THd = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKd = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        return q_THd, k_TKd, self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
