"""Autoregressive generation: prefill the prompt, then one token at a time through the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import packed_layout
from moba_train.inference.cache import CachedAttention, Decode, check_decode
from moba_train.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
    decode: Decode = "full",
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids that continue `prompt`; `stop_token` ends it and is not yielded.

    `temperature` 0 takes the most likely token; `top_p` < 1 samples from the smallest set of tokens with at least that
    probability (nucleus sampling, Holtzman et al. 2020). Equal seeds give equal text on the same device. The prompt is
    read with each layer's own attention; new tokens attend as `decode` says. Raises ValueError for an empty prompt,
    values out of range, or an attention kind that cannot generate.
    """
    check_decode(decode)
    if not prompt:
        raise ValueError("prompt: no tokens given, at least one needed")
    if temperature < 0:
        raise ValueError(f"temperature: {temperature} given, at least 0 needed")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p} given, must be above 0 and at most 1")
    if problems := {kind.generation_problem() for kind in model.attention_kinds()} - {""}:
        raise ValueError("; ".join(sorted(problems)))
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    capacity = len(prompt) + max_new_tokens
    model.set_engines([CachedAttention(capacity, decode) for _ in model.blocks])
    try:
        tokens, start = prompt, 0
        for _ in range(max_new_tokens):
            positions = torch.arange(start, start + len(tokens), device=device)
            layout = packed_layout([len(tokens)], device)
            last = torch.tensor([len(tokens) - 1], device=device)
            logits_1V = model(torch.tensor(tokens, device=device), positions, layout, rows_n=last)
            token = _sample(logits_1V[0].float(), temperature, top_p, generator)
            if token == stop_token:
                return
            yield token
            start += len(tokens)
            tokens = [token]
    finally:
        model.set_engines([LOCAL_ENGINE] * len(model.blocks))


def _sample(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities, order = (logits_V / temperature).softmax(-1).sort(descending=True)
    # A token stays while the more likely ones have less than top_p together; the first always does.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
