"""Synthetic documents that only long-range recall can predict: text from a bigram chain with facts spread over it.

A fact is a key token and the value tokens after it; keys, values and text have their own token ids. A fact's first
mention cannot be foreseen, every later one can. There are documents to pretrain on, which mention each fact several
times, and conversations for supervised fine-tuning: a document that mentions every fact once, then an outline, in which
the keys come back in another order and the answers to them, the values, are all that carries loss.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SUCCESSORS = 8
"""Each text token is followed by one of so many others: the text's entropy is log(8) = 2.08 nats."""


@dataclass(frozen=True)
class Recall:
    """Sizes of the documents, in tokens unless said otherwise."""

    length: int
    facts: int
    """Different facts of a document that is pretrained on."""
    mentions: int
    """How often it mentions each."""
    asked: int
    """Facts of a conversation, all of them asked for."""
    values: int
    """Value tokens of a fact."""
    text_ids: int = 256
    """Different text tokens there are."""
    keys: int = 256
    """Different keys there are."""
    value_ids: int = 511
    """Different values there are."""

    @property
    def vocab_size(self) -> int:
        """Text, keys, values and the mark that begins the outline."""
        return self.text_ids + self.keys + self.value_ids + 1

    def of_length(self, length: int) -> "Recall":
        """The same for documents of another length, as dense with facts."""
        return replace(self, length=length, facts=max(1, self.facts * length // self.length))

    @property
    def loss_tokens(self) -> int:
        """Of a conversation."""
        return self.asked * self.values

    @property
    def outline(self) -> int:
        """Tokens after a conversation's document: the mark, then keys and values."""
        return 1 + self.asked * (1 + self.values)


def pretraining_documents(sizes: Recall, count: int, generator: torch.Generator) -> Tensor:
    """int64 [count, length].

    All mentions of a fact lie within a stretch whose length is drawn between a hundredth of the document and all of it,
    uniformly in its logarithm: what is far is learnt from what is near.
    """
    tokens = _text(sizes, count, generator)
    facts = _facts(sizes, count, sizes.facts, generator)
    shape, device = (count, sizes.facts, 1), tokens.device
    span = 0.01 ** torch.rand(shape, generator=generator, device=device)
    within = torch.rand((*shape[:2], sizes.mentions), generator=generator, device=device)
    times = (torch.rand(shape, generator=generator, device=device) + span * within) % 1
    order = times.flatten(1).argsort(1) // sizes.mentions
    mentions = facts[torch.arange(count, device=device)[:, None], order]
    _scatter(tokens, mentions, sizes.length, generator)
    return tokens


def conversations(sizes: Recall, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int64 [count, length] and the places of the tokens that carry loss, int64 [loss_tokens]: the same for all."""
    tokens = _text(sizes, count, generator)
    facts = _facts(sizes, count, sizes.asked, generator)
    begin = sizes.length - sizes.outline
    _scatter(tokens, facts, begin, generator)
    order = torch.rand(count, sizes.asked, generator=generator, device=tokens.device).argsort(1)
    tokens[:, begin] = sizes.vocab_size - 1
    tokens[:, begin + 1 :] = facts[torch.arange(count, device=tokens.device)[:, None], order].flatten(1)
    places = torch.arange(sizes.outline - 1, device=tokens.device).view(sizes.asked, -1)[:, 1:].flatten()
    return tokens, begin + 1 + places


def _text(sizes: Recall, count: int, generator: torch.Generator) -> Tensor:
    """Bigram chains, int64 [count, length]; the bigrams are the same for every generator."""
    device = generator.device
    chain = torch.Generator().manual_seed(0)
    following = torch.rand(sizes.text_ids, sizes.text_ids, generator=chain).argsort(1)[:, :SUCCESSORS].to(device)
    which = torch.randint(SUCCESSORS, (sizes.length, count), generator=generator, device=device)
    steps = [torch.randint(sizes.text_ids, (count,), generator=generator, device=device)]
    for row in which[1:]:
        steps.append(following[steps[-1], row])
    return torch.stack(steps, dim=1)


def _facts(sizes: Recall, count: int, facts: int, generator: torch.Generator) -> Tensor:
    """Facts with different keys, int64 [count, facts, 1 + values]."""
    device = generator.device
    keys = torch.rand(count, sizes.keys, generator=generator, device=device).argsort(1)[:, :facts]
    values = torch.randint(sizes.value_ids, (count, facts, sizes.values), generator=generator, device=device)
    return torch.cat([sizes.text_ids + keys[..., None], sizes.text_ids + sizes.keys + values], dim=2)


def _scatter(tokens: Tensor, facts: Tensor, end: int, generator: torch.Generator) -> None:
    """Write `facts` [count, n, width] in their order over the text before `end`, at places that do not overlap."""
    count, number, width = facts.shape
    slots = end // (2 * width)
    if number > slots:
        raise ValueError(f"{number} facts of {width} tokens do not fit into {end} tokens; at most {slots} do")
    device = tokens.device
    slot = torch.rand(count, slots, generator=generator, device=device).argsort(1)[:, :number].sort(1).values
    offset = torch.randint(width + 1, (count, number), generator=generator, device=device)
    at = (slot * 2 * width + offset)[..., None] + torch.arange(width, device=device)
    tokens.scatter_(1, at.flatten(1), facts.flatten(1))
