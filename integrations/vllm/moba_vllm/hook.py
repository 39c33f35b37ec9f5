"""Place where vLLM's layers get the backend of their kind.

vLLM selects a backend without telling for which layer (`vllm.v1.attention.selector.get_attn_backend`), but its layer
takes one: `Attention(..., attn_backend=...)`, with further arguments for the implementation. So the constructor is
wrapped, which works for all architectures alike.
"""

import copy
import functools
import inspect
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from moba_vllm.backend import NAME, MobaBackend
from moba_vllm.layers import layer_attention


@functools.cache
def register_backend_and_hook() -> None:
    """Register the backend and wrap the constructor of vLLM's attention layer, once in a process."""
    register_backend(AttentionBackendEnum[NAME], f"{MobaBackend.__module__}.{MobaBackend.__qualname__}")
    construct = Attention.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def construct_by_kind(self: Attention, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        config = get_current_vllm_config()
        if values["attn_backend"] is None and values["attn_type"] == AttentionType.DECODER and _is_ours(config):
            kind = layer_attention(config.model_config.hf_config, extract_layer_index(values["prefix"]))
            if kind is not None:
                _check(config)
                values["attn_backend"] = MobaBackend
                values["extra_impl_args"] = {**values["extra_impl_args"], "kind": kind}
                # All pages are kept: new tokens attend to all tokens, and a window is masked.
                values["per_layer_sliding_window"] = None
                values["cache_config"] = copy.copy(values["cache_config"])
                if values["cache_config"] is not None:
                    values["cache_config"].sliding_window = None
        construct(*given.args, **given.kwargs)

    Attention.__init__ = construct_by_kind


def _is_ours(config: VllmConfig) -> bool:
    """True for a model that moba_train exported."""
    return config.model_config is not None and bool(getattr(config.model_config.hf_config, "moba", None))


def _check(config: VllmConfig) -> None:
    """Raises ValueError for features of vLLM with which this backend would compute something else."""
    parallel = config.parallel_config
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "a KV connector (it moves pages without their pooled keys)": config.kv_transfer_config is not None,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
    }
    for name, given in refused.items():
        if given:
            raise ValueError(f"{name}: not supported for models with layers of kind moba or window")
