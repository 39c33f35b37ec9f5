"""Logits of an export by MiniCPM 4's published code: `python with_minicpm.py CODE EXPORT`, with transformers 4.51.

CODE is the folder of configuration_minicpm.py and modeling_minicpm.py. In the working folder, tokens.pt; logits [T, V]
in float64 go to answers.pt. Functions of CUDA extensions are plain PyTorch here, as their source says; of blocks with
equal scores the earlier one is chosen, where `torch.topk` may choose any.
"""

import json
import sys
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, seen_KTT: Tensor) -> Tensor:
    """Attention with a mask for each key/value head."""
    sharing = q_THd.shape[1] // k_TKd.shape[1]
    q_HTd, k_HTd, v_HTd = (
        q_THd.transpose(0, 1),
        *(x.repeat_interleave(sharing, 1).transpose(0, 1) for x in (k_TKd, v_TKd)),
    )
    out_HTd = F.scaled_dot_product_attention(q_HTd, k_HTd, v_HTd, seen_KTT.repeat_interleave(sharing, 0))
    return out_HTd.transpose(0, 1)


def extension(sparse: dict[str, int]) -> dict[str, Any]:
    """Functions of the package infllm_v2, for a prompt of one text."""
    stride, window, block = sparse["kernel_stride"], sparse["kernel_size"], sparse["block_size"]

    def stage1(q_THd: Tensor, k_WKd: Tensor, _: Tensor, **_others: Any) -> Tensor:
        """Softmax over the windows complete at a query, summed over the heads of a key/value head [K, T, W]."""
        tokens = len(q_THd)
        d = q_THd.shape[2]
        ends_W = torch.arange(len(k_WKd)) * stride + window
        scores = torch.einsum("tkgd,wkd->kgtw", q_THd.unflatten(1, (k_WKd.shape[1], -1)), k_WKd) * d**-0.5
        scores = scores.masked_fill(ends_W > torch.arange(1, tokens + 1)[:, None], -torch.inf)
        return scores.softmax(-1).nan_to_num(0).sum(1)

    def max_pooling(score_KTW: Tensor, local_blocks: int, init_blocks: int, **_others: Any) -> Tensor:
        """The largest score of the windows that overlap a block [K, T, N]; local blocks are attended to anyhow."""
        tokens, windows = score_KTW.shape[1:]
        ids_N = torch.arange(-(-tokens // block))
        before, per_block = window // stride - 1, block // stride
        padded = F.pad(score_KTW, (before, max(0, len(ids_N) * per_block - windows)))
        out_KTN = padded.unfold(-1, before + per_block, per_block)[..., : len(ids_N), :].amax(-1)
        own_T1 = torch.arange(tokens)[:, None] // block
        out_KTN = out_KTN.masked_fill((ids_N <= own_T1) & (own_T1 < ids_N + local_blocks), -torch.inf)
        return out_KTN.masked_fill(ids_N < init_blocks, torch.inf)

    def attend_to_blocks(
        q: Tensor, k: Tensor, v: Tensor, *_: Any, block_window_size: int, topk_idx: Tensor, **__: Any
    ) -> Tensor:
        """Attention to the chosen blocks, -1 for none, and to the local ones."""
        at_T = torch.arange(len(q))
        own_T1 = at_T[:, None] // block
        ids_N = torch.arange(-(-len(q) // block))
        chosen_KTN = (topk_idx[..., None] == ids_N).any(2)
        chosen_KTN |= (ids_N <= own_T1) & (own_T1 < ids_N + block_window_size)
        return attend(q, k, v, chosen_KTN.repeat_interleave(block, -1)[..., : len(q)] & (at_T <= at_T[:, None]))

    functions = {"infllmv2_attn_stage1": stage1, "max_pooling_1d": max_pooling}
    return functions | {"infllmv2_attn_varlen_func": attend_to_blocks, "infllmv2_attn_with_kvcache": None}


def pad_input(x: Tensor, _: Tensor, batch: int, tokens: int) -> Tensor:
    """A batch again, of what has no padding."""
    return x.unflatten(0, (batch, tokens))


def stable_topk(x: Tensor, count: int, dim: int = -1) -> Any:
    """`topk`, which of equal values takes the first."""
    return types.SimpleNamespace(indices=x.sort(dim=dim, descending=True, stable=True).indices[..., :count])


@torch.no_grad()
def main(code: str, export: str) -> None:
    config_json = json.loads(Path(export, "config.json").read_text())
    sparse = config_json.get("sparse_config")
    if sparse:
        padding = {"index_first_axis": lambda x, rows: x[rows], "pad_input": pad_input, "unpad_input": None}
        modules: dict[str, dict[str, Any]] = {
            "flash_attn": {"flash_attn_func": None, "flash_attn_varlen_func": None},
            "flash_attn.bert_padding": padding,
            "infllm_v2": extension(sparse),
        }
        for name, functions in modules.items():
            module = sys.modules[name] = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__dict__.update(functions)
        import_module("transformers.utils").is_flash_attn_greater_or_equal_2_10 = lambda: True  # type: ignore[attr-defined]
        torch.cuda.is_available = lambda: True  # else the code takes another attention
        torch.Tensor.topk = stable_topk  # type: ignore[assignment, method-assign]  # that of blocks alone is called
    torch.set_default_dtype(torch.float64)
    folder = Path(code)
    sys.path.insert(0, str(folder.parent))
    package = folder.name
    config = import_module(f"{package}.configuration_minicpm").MiniCPMConfig(**config_json)
    config._attn_implementation = "flash_attention_2" if sparse else "eager"
    config._attn_implementation_autoset = True
    model = import_module(f"{package}.modeling_minicpm").MiniCPMForCausalLM(config).eval()
    from safetensors.torch import load_file

    model.load_state_dict(load_file(f"{export}/model.safetensors"), strict=False)
    tokens = torch.load("tokens.pt")[None]
    torch.save(model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0].double(), "answers.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
