"""Autoregressive generation: read the prompts, then one token of every sequence at a time through the cache."""

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.model.transformer import Transformer
from moba_train.tools.inference.cache import CachedAttention, CachePlan, Decode, check_decode
from moba_train.tools.inference.graph import Record, RepeatedToken

PREFILL_TOKENS = 65_536
"""Tokens of a prompt in one forward pass, or as near to it as `KindFacts.prefill_unit` allows: that bounds the
memory of activations."""


@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is drawn: temperature, nucleus and random seed."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Below 1: from the smallest set of tokens with at least this probability (nucleus sampling, Holtzman et al. 2020,
    arXiv:1904.09751)."""
    seed: int = 0
    vocab_size: int | None = None
    """Bound of the token ids that are drawn: the tokenizer's size, where the model has more rows; None: no bound."""

    def check(self) -> None:
        """Raises ValueError for values out of range."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature: {self.temperature} given, at least 0 needed")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} given, must be above 0 and at most 1")


def generate(
    model: Transformer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
    stop_tokens: Collection[int] = (),
    decode: Decode = "full",
    on_prefill: Callable[[int], object] = lambda _tokens: None,
    record: Record | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids that continue `prompt`; one of `stop_tokens` ends it and is not yielded.

    A batch of one: the other arguments are those of `Sampling` and `generate_batch`.
    """
    sampling = Sampling(temperature, top_p, seed, vocab_size)
    steps = generate_batch(
        model,
        [prompt],
        max_new_tokens,
        sampling,
        stop_tokens=stop_tokens,
        decode=decode,
        on_prefill=on_prefill,
        record=record,
    )
    with closing(steps):  # not left to the garbage collector: closing restores the model's engines
        for step in steps:
            yield step[0]


@torch.no_grad()
def generate_batch(
    model: Transformer,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_tokens: Collection[int] = (),
    decode: Decode = "full",
    on_prefill: Callable[[int], object] = lambda _tokens: None,
    ended: Callable[[int], bool] = lambda _sequence: False,
    record: Record | None = None,
) -> Generator[dict[int, int], None, None]:
    """Yield, for each step, the next token id of every running sequence by the sequence's index in `prompts`.

    A sequence ends after `max_new_tokens`, before one of `stop_tokens`, which is not yielded, or where `ended` says so,
    which is asked by the sequence's index after each of its tokens. `record`: repeats the launches of a single
    sequence's tokens (graph.py); None: every token runs as written. Prompts of any lengths are read one by one with
    each layer's own attention, `PREFILL_TOKENS` at a time; `on_prefill` gets the number of tokens that a pass has read.
    New tokens attend as `decode` says. Sequence i draws with seed + i: what it says depends on the others by rounding
    only, and is the same again on the same device. Raises ValueError for an empty prompt, values out of range, or an
    attention kind that cannot decode so.
    """
    check_generation(model, prompts, sampling, decode)
    if max_new_tokens < 1:
        return
    device = model.embedding.weight.device
    # One for each sequence, so that an answer does not depend on what else is in the batch.
    generators = [torch.Generator(device).manual_seed(sampling.seed + index) for index in range(len(prompts))]
    plan = CachePlan([len(prompt) + max_new_tokens for prompt in prompts], device)
    model.set_engines([CachedAttention(plan, decode, kind) for kind in model.attention_kinds()])
    repeated = RepeatedToken(model, plan, record) if record and len(prompts) == 1 else None
    try:
        logits = {index: _read(model, plan, index, prompt, on_prefill) for index, prompt in enumerate(prompts)}
        for step in range(max_new_tokens):
            drawn = {index: sample(logits_V, sampling, generators[index]) for index, logits_V in logits.items()}
            tokens = {index: token for index, token in drawn.items() if token not in stop_tokens}
            if tokens:
                yield tokens
            running = {index: token for index, token in tokens.items() if not ended(index)}
            if not running or step == max_new_tokens - 1:
                return
            logits = _next(model, plan, running, repeated)
    finally:
        model.set_engines([LOCAL_ENGINE] * len(model.blocks))


def check_generation(model: Transformer, prompts: Sequence[Sequence[int]], sampling: Sampling, decode: Decode) -> None:
    """Raises ValueError for an empty prompt, values out of range, or an attention kind that cannot decode so."""
    check_decode(decode)
    sampling.check()
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index}: no tokens given, at least one needed")
    problems = {kind.facts.own_decode_problem for kind in model.attention_kinds()} - {""}
    if decode == "own" and problems:
        raise ValueError("; ".join(sorted(problems)))


def _read(
    model: Transformer, plan: CachePlan, index: int, prompt: list[int], on_prefill: Callable[[int], object]
) -> Tensor:
    """Logits [V] behind the prompt of one sequence."""
    tokens_T = torch.tensor(prompt, device=plan.device)
    positions_T = torch.arange(len(prompt), device=plan.device)
    unit = math.lcm(*(kind.facts.prefill_unit for kind in model.attention_kinds()))
    # Whole units: a kind that selects for a unit of queries at once would see a part of one otherwise.
    part = max(unit, PREFILL_TOKENS // unit * unit)
    for part_T, positions_t in zip(tokens_T.split(part), positions_T.split(part), strict=True):
        plan.read(index, part_T.numel())
        last = torch.tensor([part_T.numel() - 1], device=plan.device)
        logits_1V = model(part_T, positions_t, plan.layout, rows_n=last)
        on_prefill(part_T.numel())
    return logits_1V[0]


def _next(
    model: Transformer, plan: CachePlan, tokens: dict[int, int], repeated: RepeatedToken | None
) -> dict[int, Tensor]:
    """Logits [V] behind the new token of each running sequence."""
    if repeated is not None:
        (only,) = tokens
        if (logits_V := repeated(only, tokens[only])) is not None:
            return {only: logits_V}
    # Before `plan.decode`, which counts the new tokens.
    positions_B = torch.tensor([plan.lengths[index] for index in tokens]).to(plan.device, non_blocking=True)
    plan.decode(list(tokens))
    logits_BV = model(torch.tensor(list(tokens.values()), device=plan.device), positions_B, plan.layout)
    return dict(zip(tokens, logits_BV, strict=True))


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id, drawn from its logits [V]."""
    logits_V = logits_V[: sampling.vocab_size].float()
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # The quotients of a small temperature are infinite; the largest logit's must stay a number. Below the smallest
    # normal number the temperature itself would be 0 in float32, or its reciprocal, which GPUs multiply by, infinite.
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    probabilities, order = ((logits_V - logits_V.max()) / temperature).softmax(-1).sort(descending=True)
    # A token stays while the more likely ones have less than top_p together; the first always does.
    probabilities[probabilities.cumsum(0) - probabilities >= sampling.top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
