"""The kind `infllm_v2`: what a recipe, a plan and an export need to know about InfLLM-V2."""

from collections.abc import Iterator, Sequence

from moba_train.attention.blocks.available import interpreted, triton_block_size, triton_limits
from moba_train.attention.infllm_v2.attention import InfLLMV2Attention
from moba_train.attention.kind import AttentionKind, StageContext
from moba_train.attention.moba.kind import attended_pairs
from moba_train.attention.statistics import SELECTION, SOFTMAX
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig


class InfLLMV2Kind(AttentionKind):
    """Queries attend to the first, the local and the best blocks; near a document's start to everything."""

    name = "infllm_v2"
    statistics = SOFTMAX | SELECTION
    Options = InfLLMV2Attention.Options

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (InfLLMV2Attention(options, head_dim),)

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Sizes that do not fit together, a block longer than the sequence, and a backend that cannot run."""
        assert isinstance(options, InfLLMV2Attention.Options)
        for problem in options.contradictions():
            yield f"{problem} ({context.layers})"
        if options.block_size > context.seq_len:
            yield (
                f"block_size: given {options.block_size} {context.layers}, which does not fit in a sequence of "
                f"{context.seq_len} tokens; allowed: at most seq_len"
            )
        reason = _kernels_refuse(options, context)
        if options.backend == "triton" and reason:
            yield f"backend: given 'triton' {context.layers}, which cannot run: {reason}; set auto"

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """All keys before queries at the first dense_len positions; else topk blocks, as MoBA counts them."""
        options = self._options
        pairs = 0.0
        for length in lengths:
            dense = min(length, options.dense_len)
            sparse = (attended_pairs(tokens, options.block_size, options.topk) for tokens in (length, dense))
            pairs += dense**2 / 2 + next(sparse) - next(sparse)
        return pairs

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention to the selected blocks, and the scores: 2 H d for every window before a query, forward only, in
        documents that are long enough to leave blocks out (Zhao et al. 2025, arXiv:2509.24663)."""
        options = self._options
        windows = sum(length**2 / 2 / options.stride for length in lengths if length > options.dense_tokens)
        return super().flops(model, lengths) + 2 * model.heads * model.head_width * windows

    def saved_bytes(self, model: ModelConfig, seq_len: int) -> int:
        """The selected block ids of each key/value head and two numbers for the local ones, int32; none where every
        block is selected."""
        options = self._options
        if seq_len <= options.dense_tokens:
            return 0
        return 4 * (model.kv_heads * (options.topk - options.local_blocks) + 2)

    @property
    def _options(self) -> InfLLMV2Attention.Options:
        assert isinstance(self.options, InfLLMV2Attention.Options)
        return self.options


def _kernels_refuse(options: InfLLMV2Attention.Options, context: StageContext) -> str:
    """Why the Triton kernels cannot run in this stage; empty when they can."""
    if context.device not in (None, "cuda") and not interpreted():
        return f"the run trains on {context.device}, CUDA needed"
    remote = options.topk - options.local_blocks
    return triton_limits(context.model.head_width, remote) or triton_block_size(options.block_size)
