"""Questions with known answers, a model's answers to them, and the blocks that its heads select on the way.

A model answers in one of two ways: it predicts each token of the answer given the right tokens before it, or it
generates.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.facets import Probed
from moba_train.attention.kernels.common.geometry import block_ids
from moba_train.attention.layout import Layout, TokenRange
from moba_train.attention.observer import Observer, observing
from moba_train.attention.protocol import LocalAttention, Selection
from moba_train.data.batch import Batch, collate
from moba_train.data.samples import Sample
from moba_train.errors import DataError, UserError
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationSetting
from moba_train.model.part import own_layers
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import most_likely_tokens
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.generate import generate
from moba_train.tools.needle.full_answers import full_from
from moba_train.tools.needle.haystack import stage_lengths
from moba_train.tools.needle.options import AnswersConfig
from moba_train.tools.text_tokenizer import TextTokenizer

AnyAnswers = TypeVar("AnyAnswers", bound=AnswersConfig)


class QuestionsByLength(Evaluation[AnyAnswers]):
    """Base of evaluations whose samples have one of several `lengths`, in tokens."""

    def choose_lengths(
        self, setting: EvaluationSetting, fits: Callable[[int], bool], check: Callable[[int], object], least: int = 0
    ) -> None:
        """Set `lengths`: those of the options that the stage has, above `least`, or of the usual ones those that
        samples fit in. Without any, sets `missing`. check: raises DataError for a length that has no samples."""
        usual = self._options.lengths is None
        given = [length for length in stage_lengths(self._options, setting.stage) if length > least]
        self.lengths = [length for length in given if not usual or fits(length)]
        self._check_length = check
        if not self.lengths:
            seq_len = setting.stage.seq_len
            above = f" and above {least}" if least else ""
            self.missing = f"{self.key}.lengths: none is at most the stage's seq_len {seq_len}{above}"
            if usual and not above:
                try:
                    check(seq_len)
                except DataError as error:  # by how much the samples do not fit
                    self.missing = str(error)

    @classmethod
    def data_problems(cls, options: AnyAnswers, setting: EvaluationSetting) -> Iterator[str]:
        """No given length that the stage has."""
        if not stage_lengths(options, setting.stage):
            seq_len = setting.stage.seq_len
            yield f"{cls.key}.lengths has none of at most seq_len {seq_len}; add one"

    @classmethod
    def check_samples(cls, options: AnyAnswers, setting: EvaluationSetting) -> None:
        """Raise DataError for lengths without samples, and for files and texts that do not give them."""
        made = cls(options, setting)
        for length in made.lengths:
            made._check_length(length)


class SelectedBlocks(Observer):
    """Counts, layer by layer, the heads whose query for a token of the answer may attend to the token to copy.

    Every rank counts its own queries and heads; `shares` adds them up.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layer = 0
        self._queries_n = torch.zeros(0, dtype=torch.int64, device=device)
        self._sources_n = self._queries_n
        self._counts = torch.zeros(layers, 2, dtype=torch.float64, device=device)

    def watch(self, places: Sequence[int], sources: Sequence[int]) -> None:
        """Count for the queries that predict the tokens at `places`, each a copy of one of `sources`, from now on.
        Without places, count nothing."""
        device = self._counts.device
        self._queries_n = torch.tensor(places, dtype=torch.int64, device=device) - 1
        self._sources_n = torch.tensor(sources[: len(places)], dtype=torch.int64, device=device)

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Count the watched queries that are among the layout's."""
        q_tokens_T = layout.q_tokens
        row_n = torch.searchsorted(q_tokens_T, self._queries_n).clamp_(max=len(q_tokens_T) - 1)
        here_n = q_tokens_T[row_n] == self._queries_n
        found = attention.selected_by(row_n[here_n], selection, layout) if isinstance(attention, Probed) else None
        if found is None:
            return
        selected_HnC, block_size = found
        queries_n, sources_n = self._queries_n[here_n], self._sources_n[here_n]
        own_n, block_n = (
            block_ids(tokens_n, layout.documents(tokens_n), layout, block_size) for tokens_n in (queries_n, sources_n)
        )
        selected_Hn = (selected_HnC == block_n[None, :, None]).any(-1) | (own_n == block_n)
        self._counts[self._layer, 0] += selected_Hn.sum()
        self._counts[self._layer, 1] += selected_Hn.numel()

    def shares(self) -> list[float | None]:
        """Share of heads and queries of each layer; None for a layer that attends to everything. Called on all ranks
        together."""
        dist.all_reduce(self._counts)
        return [found / asked if asked else None for found, asked in self._counts.tolist()]

    @contextmanager
    def observing(self, context: EvaluationContext) -> Iterator["SelectedBlocks"]:
        """Inside, this sees the attention of the context's model."""
        hooks = [
            # On blocks, not inside: torch.compile compiles their forward functions alone.
            block.register_forward_pre_hook(lambda _module, _inputs, layer=layer: self._enter(layer))
            for layer, block in zip(own_layers(context.model), context.model.blocks, strict=True)
        ]
        try:
            with observing(context.data_shard.engine or LOCAL_ENGINE, self):
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, layer: int) -> None:
        self._layer = layer


@dataclass(frozen=True)
class Question:
    """A prompt and its right answers, as tokens."""

    tokens: list[int]
    """The prompt, then the text of all answers."""
    prompt_length: int
    """Tokens of the prompt."""
    answers: list[TokenRange]
    """Range of each answer in `tokens`, without what separates the answers."""
    sources: list[int]
    """Index of the token that each token of the answers, in order, is a copy of; empty: not known."""
    text_length: int = 0
    """Tokens of the prompt before the question."""

    @property
    def prompt(self) -> list[int]:
        """Tokens that the model reads."""
        return self.tokens[: self.prompt_length]

    @property
    def places(self) -> list[int]:
        """Index of each token of the answers, in order."""
        return [place for answer in self.answers for place in range(*answer)]

    def right(self, predicted: Sequence[int]) -> list[bool]:
        """Verdict on each answer: True if all of its tokens are right. `predicted`: one token for each of theirs."""
        found = dict(zip(self.places, predicted, strict=True))
        return [all(found[place] == self.tokens[place] for place in range(*answer)) for answer in self.answers]


def encode_segments(tokenizer: TextTokenizer, segments: Sequence[str]) -> list[list[int]]:
    """Tokens of consecutive segments of one text, each encoded as it continues the text before it.

    No token spans two segments, because a model writes one after the other.
    """
    found: list[list[int]] = []
    for count, segment in enumerate(segments):
        before = tokenizer.encode("".join(segments[:count])) if count else []
        both = tokenizer.encode("".join(segments[: count + 1]))
        # The encoding of both may join their ends into one token.
        found.append(both[len(before) :] if both[: len(before)] == before else tokenizer.encode(segment))
    return found


def padded_length(length: int, data_shard: DataShard) -> int:
    """The smallest number of tokens, `length` or more, that the ranks which share a sequence can divide evenly."""
    cp = 1 if data_shard.engine is None else data_shard.engine.strategy.ranks
    unit = data_shard.tp_size * (2 * cp if cp > 1 else 1)
    return -(-length // unit) * unit


def answer_batch(question: Question, length: int) -> Batch:
    """`answer_sample` as a batch."""
    return collate([answer_sample(question, length)])


def answer_sample(question: Question, length: int) -> Sample:
    """A sample of `length` tokens in which the predictions of the answers' tokens carry loss; the rest is padding."""
    tokens = np.zeros(length, dtype=np.int64)
    tokens[: len(question.tokens)] = question.tokens
    labels = np.zeros(length, dtype=np.int64)
    labels[:-1] = tokens[1:]
    weight = np.zeros(length, dtype=np.float32)
    weight[np.array(question.places) - 1] = 1
    padding = length - len(question.tokens)
    lengths = [len(question.tokens), padding] if padding else [length]
    return Sample(tokens, labels, weight, lengths, [])


@torch.no_grad()
def predicted_answers(
    context: EvaluationContext,
    questions: Sequence[Question],
    length: int,
    what: str,
    blocks: SelectedBlocks | None,
    in_full: bool = False,
) -> list[list[int]]:
    """The most likely token for each token of the answers, given all right tokens before it; `in_full`: question and
    answers with full attention.

    Equal on every rank. Called on all ranks together: each data-parallel rank makes the same number of passes, of one
    question each, padded to `length` or a little more. `what` names the loop for people. `blocks` counts the blocks
    that attention selects.
    """
    shard = context.data_shard
    most = max(len(question.places) for question in questions)
    predicted = torch.zeros(len(questions), most, dtype=torch.int64, device=context.device)
    for index, counts in context.passes(len(questions), what):
        question = questions[index]
        batch = shard.shard_batch(answer_batch(question, padded_length(length, shard)))
        rows_n = batch.loss_index[batch.loss_weight > 0]
        order_T = torch.zeros(len(question.tokens), dtype=torch.int64)
        order_T[torch.tensor(question.places) - 1] = torch.arange(len(question.places))
        order_n = order_T[batch.positions[rows_n]].to(context.device)
        if blocks is not None:
            blocks.watch(question.places if counts else [], question.sources)
        with full_from(context.model, question.text_length) if in_full else nullcontext():
            tokens_n = most_likely_tokens(context.model, batch.to(context.device))
        if counts and len(rows_n):
            predicted[index, order_n] = tokens_n
    dist.all_reduce(predicted)  # each token is predicted on exactly one rank; all others have 0
    return [row[: len(question.places)] for row, question in zip(predicted.tolist(), questions, strict=True)]


def generated_answers(
    context: EvaluationContext,
    questions: Sequence[Question],
    tokens: int,
    tokenizer: TextTokenizer,
    what: str,
    in_full: bool = False,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """Continuation of each prompt by greedy generation with the layers' own attention, up to `tokens` tokens, and
    before one of `ends` or the tokenizer's `eos_id`; `in_full`: question and answer with full attention.

    Equal on every rank. Called on all ranks together. Each rank holds whole sequences, of questions that no other rank
    has, and all ranks make the same number of passes, so that sharded weights can be gathered. Raises UserError for a
    model that cannot generate.
    """
    shard = context.data_shard
    if shard.tp_size > 1:
        raise UserError("answers cannot be generated under parallel.tp; set scoring: teacher_forced")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ends = {*ends} if tokenizer.eos_id is None else {*ends, tokenizer.eos_id}
    found: dict[int, list[int]] = {}
    try:
        for first in context.track(range(0, len(questions), ranks), what):
            context.between_batches()
            index = first + rank
            question = questions[min(index, len(questions) - 1)]
            decode: Decode = "full" if in_full else "own"
            with full_from(context.model, question.text_length) if in_full else nullcontext():
                answer = list(
                    generate(
                        context.model,
                        question.prompt,
                        tokens,
                        temperature=0,
                        vocab_size=tokenizer.vocab_size,
                        # Ranks that end early would leave the others waiting.
                        stop_tokens=ends if ranks == 1 else (),
                        decode=decode,
                    )
                )
            if index < len(questions):
                found[index] = list(itertools.takewhile(lambda token: token not in ends, answer))
    except ValueError as error:
        raise UserError(str(error)) from error
    finally:
        context.model.set_engines([shard.engine or LOCAL_ENGINE] * context.model.config.layers)
    everyone: list[dict[int, list[int]] | None] = [None] * ranks
    dist.all_gather_object(everyone, found)
    answers = {index: answer for part in everyone for index, answer in (part or {}).items()}
    return [answers[index] for index in range(len(questions))]


def share(values: Sequence[bool]) -> float:
    """Share of true values."""
    return sum(values) / len(values)
