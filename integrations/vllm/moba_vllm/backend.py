"""vLLM's attention backend for layers of the kinds `moba` and `window`.

vLLM has a backend, an implementation for each layer, and metadata of each step that a builder makes for all layers.

Shape suffixes: as in paged.py; Q all new tokens of a step.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.kv_cache_interface import AttentionSpec, is_quantized_kv_cache

from moba_vllm.layers import Moba, Window, decode_mode
from moba_vllm.paged import (
    PagedAttention,
    PooledKeys,
    attend_from_many,
    attend_from_one,
    kernel_reads,
    page_problem,
    text_rows,
)

NAME = "CUSTOM"
"""The backend's name in vLLM: the one that all its releases have for backends of others."""


class MobaBackend(AttentionBackend):
    """Backend of layers that hook.py gives it; vLLM's own serves the others."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, int, int, int]:
        """Shape of a layer's pages, which vLLM 0.26 asks for, and 0.32 does not."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_impl_cls() -> type["MobaImpl"]:
        return MobaImpl

    @staticmethod
    def get_builder_cls() -> type["MobaBuilder"]:
        return MobaBuilder


class Text(NamedTuple):
    """Several new tokens of one request."""

    request: int
    rows: slice
    """Its new tokens among those of the step."""
    tokens: int
    """Length with the new tokens."""
    own: bool
    """True if the new tokens attend as their layer does; else to all tokens before."""


class Singles(NamedTuple):
    """Requests with one new token each."""

    requests_R: Tensor
    rows_R: Tensor
    positions_R: Tensor
    longest: int
    own: bool


@dataclass
class MobaMetadata(AttentionMetadata):
    """One step of all layers of this backend."""

    slots_Q: Tensor
    """Place of each new token in the cache: page * P + token of the page."""
    table_RL: Tensor
    """Pages of each request."""
    extents: list[tuple[int, int]]
    """Each request's tokens before the step and behind it."""
    texts: list[Text]
    singles: list[Singles]
    _completed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def completed(self, block_size: int) -> tuple[Tensor, Tensor]:
        """(requests, blocks), int64 [M] each: the blocks of this size that the step completes. Kept, for all layers."""
        if block_size not in self._completed:
            found = [
                (request, block)
                for request, (before, tokens) in enumerate(self.extents)
                for block in range(before // block_size, tokens // block_size)
            ]
            pairs_2M = torch.tensor(found, dtype=torch.int64).view(-1, 2).T.to(self.table_RL.device)
            self._completed[block_size] = (pairs_2M[0], pairs_2M[1])
        return self._completed[block_size]


class MobaBuilder(AttentionMetadataBuilder[MobaMetadata]):
    """Makes a step's metadata from vLLM's."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Raises ValueError when vLLM's pages and a layer's blocks do not fit each other."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.decodes_own = decode_mode(vllm_config.model_config.hf_config) == "own"
        for name, layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).items():
            kind = layer.impl.kind
            problem = page_problem(kind.block_size, kv_cache_spec.block_size) if isinstance(kind, Moba) else ""
            if problem:
                raise ValueError(f"{name}: {problem}")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MobaMetadata:
        """Sort requests by their number of new tokens, and by the attention of these: a prompt's are read as the layer
        attends, others are decoded."""
        common = common_attn_metadata
        assert common.seq_lens_cpu_upper_bound is not None
        assert common.is_prefilling is not None
        edges = common.query_start_loc_cpu.tolist()
        lengths = common.seq_lens_cpu_upper_bound.tolist()
        extents: list[tuple[int, int]] = []
        texts: list[Text] = []
        single: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        prefills = common.is_prefilling.tolist()
        for request, prefilling in enumerate(prefills):
            first, end, tokens = edges[request], edges[request + 1], lengths[request]
            extents.append((tokens - (end - first), tokens))
            own = prefilling or self.decodes_own
            if end - first == 1:
                single[own].append((request, first, tokens - 1))
            elif end > first:  # a request without new tokens fills up a graph
                texts.append(Text(request, slice(first, end), tokens, own))
        singles = []
        for own, found in single.items():
            if found:
                requests_R, rows_R, positions_R = torch.tensor(found).T.to(self.device, non_blocking=True)
                longest = 1 + max(position for _, _, position in found)
                singles.append(Singles(requests_R, rows_R, positions_R, longest, own))
        slots_Q = common.slot_mapping[: edges[len(prefills)]]  # those behind fill up a graph
        return MobaMetadata(slots_Q, common.block_table_tensor, extents, texts, singles)


class MobaImpl(AttentionImpl[MobaMetadata]):
    """Attention of one layer: writes new keys and values into its pages, pools the keys of blocks that are complete
    now, and attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        kind: Moba | Window,
        sinks: Tensor | None = None,
    ) -> None:
        """kind: of the layer. Raises ValueError for what an export of moba_train has not, or this backend cannot."""
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a soft cap of logits": bool(logits_soft_cap),
            "sinks of heads": sinks is not None,
            "keys shared with another layer": kv_sharing_target_layer_name is not None,
            f"kv_cache_dtype {kv_cache_dtype}": is_quantized_kv_cache(kv_cache_dtype),
        }
        for name, given in refused.items():
            if given:
                raise ValueError(f"{name}: not supported in layers of kind {type(kind).__name__.lower()}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.kind = kind
        self.pooled: PooledKeys | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MobaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """`output` [Q and more, H, d], filled with the attention of the step's new tokens.

        kv_cache: [pages, K, P, 2 * d]
        attn_metadata: None while vLLM measures its memory, before there is a cache
        """
        if attn_metadata is None:
            return output.fill_(0)
        assert output_scale is None, "no fusion with quantization is offered"
        assert output_block_scale is None
        step = attn_metadata
        q_QHd, k_QKd, v_QKd = (x[: len(step.slots_Q)] for x in (query, key, value))
        page_size = kv_cache.shape[2]
        kv_cache[step.slots_Q // page_size, :, step.slots_Q % page_size] = torch.cat([k_QKd, v_QKd], -1)
        pooled = self._pool(kv_cache, step)
        paged = _flash_attention(self.head_size, self.scale) if kernel_reads(kv_cache, self.kind) else None
        for some in step.singles:
            table_RL = step.table_RL[some.requests_R]
            kind = self.kind if some.own or isinstance(self.kind, Window) else None
            given = some.positions_R, some.longest, kind, pooled, self.scale, paged
            output[some.rows_R] = attend_from_one(q_QHd[some.rows_R], kv_cache, table_RL, *given)
        for text in step.texts:
            pages_L = step.table_RL[text.request]
            kv_SKe = text_rows(kv_cache, pages_L, text.tokens)
            pooled_NKd = pooled.read(pages_L[None], text.tokens // pooled.block_size)[0] if pooled else None
            kind = self.kind if text.own or isinstance(self.kind, Window) else None
            output[text.rows] = attend_from_many(q_QHd[text.rows], kv_SKe, pooled_NKd, kind, self.scale)
        return output

    def _pool(self, kv_cache: Tensor, step: MobaMetadata) -> PooledKeys | None:
        """The layer's pooled keys, with those of the blocks that the step completes; None without MoBA."""
        if not isinstance(self.kind, Moba):
            return None
        if self.pooled is None or len(self.pooled.keys) != len(kv_cache):
            self.pooled = PooledKeys(kv_cache, self.kind.block_size)
        requests_M, blocks_M = step.completed(self.kind.block_size)
        if len(blocks_M):
            self.pooled.update(kv_cache, step.table_RL, requests_M, blocks_M)
        return self.pooled


@cache
def _flash_attention(head_size: int, scale: float) -> PagedAttention | None:
    """vLLM's own FlashAttention for one new token of each text; None if vLLM has none for this GPU, as for AMD's."""
    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func  # absent from the build for CPUs

    def attend(q_RHd: Tensor, k: Tensor, v: Tensor, table_RL: Tensor, lengths_R: Tensor, longest: int) -> Tensor:
        edges = torch.arange(len(q_RHd) + 1, dtype=torch.int32, device=q_RHd.device)
        texts = {"seqused_k": lengths_R.int(), "block_table": table_RL.int(), "fa_version": version}
        out: Tensor = flash_attn_varlen_func(q_RHd, k, v, 1, edges, longest, softmax_scale=scale, **texts)
        return out

    return attend
