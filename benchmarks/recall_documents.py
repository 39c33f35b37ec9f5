"""Synthetic documents that can be predicted only by long-range recall: text from a bigram chain with scattered facts.

A fact is a key token followed by its value tokens; keys, values and text have separate token ids. The first mention of
a fact is unpredictable, every later one is predictable. Pretraining documents mention each fact several times.
Conversations for supervised fine-tuning consist of a document that mentions every fact once, and an outline that
repeats the keys in another order, each followed by its values. Only these values carry loss.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SUCCESSORS = 8
"""Number of tokens that can follow a text token; the entropy of the text is log(8) = 2.08 nats per token."""


@dataclass(frozen=True)
class Recall:
    """Sizes of the documents."""

    length: int
    """Tokens in a document or conversation."""
    facts: int
    """Different facts in a pretraining document."""
    mentions: int
    """Mentions of each fact in a pretraining document."""
    asked: int
    """Facts in a conversation; it asks for all of them."""
    values: int
    """Value tokens in a fact."""
    text_ids: int = 256
    """Number of different text tokens."""
    keys: int = 256
    """Number of different keys."""
    value_ids: int = 511
    """Number of different values."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: text, keys, values and the marker that begins the outline."""
        return self.text_ids + self.keys + self.value_ids + 1

    def with_length(self, length: int) -> "Recall":
        """These sizes for documents of another length, with the same density of facts."""
        return replace(self, length=length, facts=max(1, self.facts * length // self.length))

    @property
    def loss_tokens(self) -> int:
        """Tokens in a conversation that carry loss."""
        return self.asked * self.values

    @property
    def outline(self) -> int:
        """Tokens after the document of a conversation: the marker, then keys and values."""
        return 1 + self.asked * (1 + self.values)


def pretraining_documents(sizes: Recall, count: int, generator: torch.Generator) -> Tensor:
    """Token ids of `count` documents, int64 [count, length].

    All mentions of a fact lie within an interval whose length is drawn log-uniformly between a hundredth of the
    document's length and its full length, so that the model can learn distant recall from near recall.
    """
    tokens = _text(sizes, count, generator)
    facts = _facts(sizes, count, sizes.facts, generator)
    shape = (count, sizes.facts, 1)
    device = tokens.device
    interval = 0.01 ** torch.rand(shape, generator=generator, device=device)
    within = torch.rand((*shape[:2], sizes.mentions), generator=generator, device=device)
    times = (torch.rand(shape, generator=generator, device=device) + interval * within) % 1
    order = times.flatten(1).argsort(1) // sizes.mentions
    mentions = facts[torch.arange(count, device=device)[:, None], order]
    _scatter(tokens, mentions, sizes.length, generator)
    return tokens


def conversations(sizes: Recall, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids of `count` conversations, int64 [count, length], and the positions of the tokens that carry loss, int64
    [loss_tokens], which are equal in all conversations."""
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
    """Bigram chains, int64 [count, length]; the bigrams do not depend on the generator."""
    device = generator.device
    chain = torch.Generator().manual_seed(0)
    following = torch.rand(sizes.text_ids, sizes.text_ids, generator=chain).argsort(1)[:, :SUCCESSORS].to(device)
    which = torch.randint(SUCCESSORS, (sizes.length, count), generator=generator, device=device)
    steps = [torch.randint(sizes.text_ids, (count,), generator=generator, device=device)]
    for row in which[1:]:
        steps.append(following[steps[-1], row])
    return torch.stack(steps, dim=1)


def _facts(sizes: Recall, count: int, facts: int, generator: torch.Generator) -> Tensor:
    """Facts with distinct keys, int64 [count, facts, 1 + values]."""
    device = generator.device
    keys = torch.rand(count, sizes.keys, generator=generator, device=device).argsort(1)[:, :facts]
    values = torch.randint(sizes.value_ids, (count, facts, sizes.values), generator=generator, device=device)
    return torch.cat([sizes.text_ids + keys[..., None], sizes.text_ids + sizes.keys + values], dim=2)


def _scatter(tokens: Tensor, facts: Tensor, end: int, generator: torch.Generator) -> None:
    """Write `facts` [count, n, width], in order, over the text before `end`, at random disjoint positions."""
    count, number, width = facts.shape
    slots = end // (2 * width)
    if number > slots:
        raise ValueError(f"{number} facts of {width} tokens do not fit into {end} tokens; at most {slots} do")
    device = tokens.device
    slot = torch.rand(count, slots, generator=generator, device=device).argsort(1)[:, :number].sort(1).values
    offset = torch.randint(width + 1, (count, number), generator=generator, device=device)
    at = (slot * 2 * width + offset)[..., None] + torch.arange(width, device=device)
    tokens.scatter_(1, at.flatten(1), facts.flatten(1))
