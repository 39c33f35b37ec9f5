"""Names that Hugging Face's Llama, Qwen2 and Qwen3 give to the parameters of `model.transformer.Transformer`.

The tensors are equal: rotary embeddings pair the two halves of a head on both sides, so nothing is permuted.
"""

import re

_OUTSIDE_BLOCKS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(\w+)\.(.+)")


def hf_name(name: str) -> str:
    """The Hugging Face name of our parameter `name`. Raises KeyError when it has none."""
    if match := _BLOCK.fullmatch(name):
        layer, part, rest = match.groups()
        return f"model.layers.{layer}.{_IN_BLOCK[part]}.{rest}"
    return _OUTSIDE_BLOCKS[name]
