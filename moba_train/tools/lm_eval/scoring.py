"""Log-likelihoods of continuations: texts of any lengths are packed, as documents, into few forward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.layout import packed_layout
from moba_train.model.loss import chunk_tokens
from moba_train.model.transformer import Transformer
from moba_train.tools.needle.full_answers import full_for

Document = tuple[int, ...]
Read = tuple[Document, int]
"""A document, and how many of its last tokens attend to all keys whatever the layers' attention is."""


@dataclass(frozen=True)
class Continuation:
    """Tokens that the model reads, and those that it is to predict."""

    read: Document
    """Context and continuation, without the continuation's last token; at least as many tokens as `predicted`."""
    predicted: Document
    """The continuation, which the last tokens of `read` predict."""


@dataclass(frozen=True)
class Score:
    """Quality of the prediction of a continuation."""

    log_likelihood: float
    """Sum of the log-likelihoods of its tokens, in nats."""
    greedy: bool
    """True if each of its tokens is the most likely one."""


@torch.no_grad()
def score(
    model: Transformer,
    continuations: Sequence[Continuation],
    batch_tokens: int,
    on_done: Callable[[int], object] = lambda _count: None,
    in_full: bool = False,
) -> list[Score]:
    """Score of each continuation, with the model's present attention; `in_full`: the tokens that predict the
    continuation with full attention, all before them with the present one.

    A pass takes documents of at most `batch_tokens` tokens together, or a single longer one; texts that are read for
    several continuations are read once. `on_done` gets the number of continuations scored by each pass.
    """
    scores: dict[int, Score] = {}
    for documents in _passes(continuations, batch_tokens, in_full):
        indices = list(chain.from_iterable(documents.values()))
        predicted = [continuations[index].predicted for index in indices]
        log_likelihoods, greedy = _predict(model, list(documents), _rows(documents, continuations), predicted)
        first = 0
        for index, tokens in zip(indices, predicted, strict=True):
            own = slice(first, first + len(tokens))
            scores[index] = Score(log_likelihoods[own].sum().item(), bool(greedy[own].all()))
            first = own.stop
        on_done(len(indices))
    return [scores[index] for index in range(len(continuations))]


def _passes(continuations: Sequence[Continuation], batch_tokens: int, in_full: bool) -> Iterator[dict[Read, list[int]]]:
    """Yield, for each pass, its documents with the continuations that each is read for. The longest documents come
    first, so that a pass that does not fit into memory fails at once."""
    readers: dict[Read, list[int]] = {}
    for index in sorted(range(len(continuations)), key=lambda index: -len(continuations[index].read)):
        one = continuations[index]
        readers.setdefault((one.read, len(one.predicted) if in_full else 0), []).append(index)
    taken: dict[Read, list[int]] = {}
    tokens = 0
    for (document, answered), indices in readers.items():
        if taken and tokens + len(document) > batch_tokens:
            yield taken
            taken = {}
            tokens = 0
        taken[document, answered] = indices
        tokens += len(document)
    if taken:
        yield taken


def _rows(documents: dict[Read, list[int]], continuations: Sequence[Continuation]) -> list[int]:
    """Rows of the pass that predict the continuations' tokens, in order."""
    ends = accumulate(len(document) for document, _ in documents)
    return [
        row
        for end, indices in zip(ends, documents.values(), strict=True)
        for index in indices
        for row in range(end - len(continuations[index].predicted), end)
    ]


def _predict(
    model: Transformer, documents: Sequence[Read], rows: list[int], predicted: Sequence[Document]
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each predicted token, float64 [n], and whether it is the most likely one, bool [n]."""
    device = model.embedding.weight.device
    lengths = [len(document) for document, _ in documents]
    tokens_T = torch.tensor(list(chain.from_iterable(document for document, _ in documents)), device=device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    answered = [[place >= len(document) - last for place in range(len(document))] for document, last in documents]
    answered_T = torch.tensor(list(chain.from_iterable(answered)), device=device)
    in_full = any(last for _, last in documents)
    with full_for(model, lambda at_n: answered_T[at_n]) if in_full else nullcontext():
        hidden_TD, _ = model.hidden(tokens_T, positions_T, packed_layout(lengths, device))
    labels_n = torch.tensor(list(chain.from_iterable(predicted)), dtype=torch.int64, device=device)
    rows_n = torch.tensor(rows, dtype=torch.int64, device=device)
    log_likelihoods: list[Tensor] = []
    greedy: list[Tensor] = []
    at_once = chunk_tokens(model.config.vocab_size)
    for own_rows, own_labels in zip(rows_n.split(at_once), labels_n.split(at_once), strict=True):
        logits_nV = model.logits(hidden_TD, own_rows)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        log_likelihoods.append(-F.cross_entropy(logits_nV, own_labels, reduction="none").double().cpu())
        greedy.append((logits_nV.argmax(-1) == own_labels).cpu())
    return torch.cat(log_likelihoods), torch.cat(greedy)
