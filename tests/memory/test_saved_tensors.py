"""Tensors that a block keeps for its backward pass, counted and as autograd saves them."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.layout import packed_layout
from moba_train.config.model import ModelConfig
from moba_train.memory import layer_memory
from moba_train.model.rope import rope_cos_sin
from moba_train.model.transformer import Transformer


def saved_bytes(model: ModelConfig) -> int:
    """Bytes that a compiled block keeps of each token for its backward pass, weights left out."""
    tokens = 512
    whole = Transformer(model).bfloat16()
    whole.set_attention([FullKind(FullKind.Options(), model.head_width)])
    (block,) = whole.blocks
    saved: dict[int, Tensor] = {}

    def noted(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(tokens, model.hidden_size, dtype=torch.bfloat16).requires_grad_()
    angles = rope_cos_sin(torch.arange(tokens), model.rope, model.head_width)
    torch.compiler.reset()
    with saved_tensors_hooks(noted, lambda tensor: tensor):
        torch.compile(block, backend="aot_eager_decomp_partition")(x, *angles, packed_layout([tokens]))
    others = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *angles)}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in others) // tokens


@pytest.mark.parametrize("qk_norm", [True, "all_heads"])
def test_norms_of_queries_and_keys_keep_what_is_counted(qk_norm: bool | str) -> None:
    """Queries and keys before the norm, and a scale for each vector that is normalised."""
    sizes = {"vocab_size": 2, "hidden_size": 64, "intermediate_size": 96, "layers": 1, "heads": 8, "kv_heads": 2}
    models = [ModelConfig.model_validate(sizes | {"head_dim": 16, "qk_norm": norm}) for norm in (False, qk_norm)]
    counted = [layer_memory.block_bytes(model, 2, 1, compiled=True, input_width=2).attention for model in models]
    saved = list(map(saved_bytes, models))
    assert saved[1] - saved[0] == counted[1] - counted[0]
