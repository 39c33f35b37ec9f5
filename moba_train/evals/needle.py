"""Needle in a haystack: is a sentence found in a long text, wherever it is?"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moba_train.attention.protocol import TokenRange
from moba_train.config.base import format_count
from moba_train.config.evaluation import HiddenNeedles, NeedleConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import DataError
from moba_train.evals.answers import (
    Question,
    SelectedBlocks,
    encode_segments,
    generated_answers,
    predicted_answers,
    share,
)
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult
from moba_train.evals.haystack import (
    Conversation,
    NaturalText,
    corpus_of,
    draw_keys,
    draw_values,
    length_problems,
    needle_frame,
    needle_parts,
    noise_tokens,
    open_tokenizer,
    separated,
    stage_lengths,
    trained_length,
)

GENERATED = 16
"""Tokens that are generated for each needle, at least: numbers have seven digits."""


class Needle(Evaluation):
    """Share of the samples, over lengths and depths, in which every token of the answer is the most likely one."""

    name = "needle"
    Options = NeedleConfig
    data_name = "needle_map"
    numbers = frozenset({"needle"})
    numbers_against_full = frozenset({"needle_full"})

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        wanted = self.options_in(config)
        assert isinstance(wanted, NeedleConfig)
        self.every = wanted.every or config.evaluation.every
        self.compare_with_full = wanted.attention == "both"
        self._wanted = wanted
        self._trained = trained_length(config, stage)
        self._texts = NeedleTexts(config, wanted, self.key)
        self._lengths = stage_lengths(wanted, stage)
        if wanted.lengths is None:
            self._lengths = [length for length in self._lengths if self._texts.fits(length)]
        if not self._lengths:
            self.missing = f"{self.key}.lengths: none is at most the stage's seq_len {stage.seq_len} and holds a needle"

    @classmethod
    def problems(cls, config: RunConfig) -> Iterator[str]:
        """No tokenizer, no text, lengths that no stage has, or fewer keys than needles."""
        wanted = cls.options_in(config)
        if not isinstance(wanted, NeedleConfig):
            return
        yield from text_problems(config, wanted, cls.key)
        if wanted.generate and config.parallel.tp > 1:
            yield f"{cls.key}.generate: given true, which parallel.tp {config.parallel.tp} cannot do; set it to false"

    @classmethod
    def pipeline_problem(cls, config: RunConfig) -> tuple[str, str] | None:
        """Generation."""
        wanted = cls.options_in(config)
        generates = isinstance(wanted, NeedleConfig) and wanted.generate
        return (f"{cls.key}.generate: given true", "set it to false") if generates else None

    @classmethod
    def data_problems(cls, config: RunConfig, stage: Stage) -> Iterator[str]:
        """No length of the recipe's that the stage has."""
        wanted = cls.options_in(config)
        if isinstance(wanted, NeedleConfig) and not stage_lengths(wanted, stage):
            yield f"{cls.key}.lengths has none of at most seq_len {stage.seq_len}; add one, or set extrapolate: true"

    @classmethod
    def check_samples(cls, config: RunConfig, stage: Stage) -> None:
        """Raises DataError for lengths that leave no room for the needles, and for too little text around them."""
        needle = cls(config, stage)
        for length in needle._lengths:
            needle._texts.check(length)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`needle` with the own attention; `needle_full` with full attention on the same weights."""
        wanted = self._wanted
        trained = context.trained_length or self._trained
        questions = {length: self._texts.questions(length) for length in self._lengths}
        maps = {name: self._map(context, questions, name) for name in context.each_attention()}
        own = maps[context.own]
        numbers = {"needle": own.score}
        count = sum(map(len, questions.values()))
        message = f"needle {own.score:.3f} of {count} samples with {context.own} attention"
        if "full" in maps and context.own != "full":
            numbers["needle_full"] = maps["full"].score
            message += f", {maps['full'].score:.3f} with full attention on the same weights"
        data = {
            "attention": context.own,
            "trained_length": trained,
            "lengths": self._lengths,
            "depths": wanted.depths,
            "samples": wanted.samples,
            "seed": wanted.seed,
            "needles": wanted.needles,
            "keys": wanted.keys or wanted.needles,
            "haystack": wanted.haystack,
            "tokens": sum(len(question.tokens) for found in questions.values() for question in found),
            "maps": {name: found.to_json() for name, found in maps.items()},
        }
        where = f"{wanted.samples} samples per cell, seed {wanted.seed}, {wanted.haystack} haystack"
        table = [line for name, found in maps.items() for line in found.table(name, self._lengths, wanted.depths)]
        table.append(f"{where}; trained on {trained} tokens")
        return EvaluationResult(numbers, message, [*table, message], data)

    def _map(self, context: EvaluationContext, questions: Mapping[int, list[Question]], name: str) -> "NeedleMap":
        """What the model finds with its present attention."""
        found = NeedleMap([], [], [], [] if self._wanted.generate else None)
        for length, asked in questions.items():
            blocks = SelectedBlocks(context.model.config.layers, context.device)
            what = f"needle, {name}, {format_count(length, 1024)}"
            with blocks.observing(context):
                predicted = predicted_answers(context, asked, length, what, blocks)
            right = [question.right(tokens) for question, tokens in zip(asked, predicted, strict=True)]
            found.passed.append(self._by_depth([all(answers) for answers in right]))
            found.answers.append(self._by_depth([share(answers) for answers in right]))
            found.selected.append(blocks.shares())
            if found.generated is not None:
                found.generated.append(self._by_depth(self._generated(context, asked, what)))
        return found

    def _generated(self, context: EvaluationContext, questions: Sequence[Question], what: str) -> list[bool]:
        """Whether each generated answer has every value."""
        tokenizer = self._texts.tokenizer
        tokens = GENERATED * self._wanted.needles + max(q.places[-1] + 1 - q.prompt_length for q in questions)
        answers = generated_answers(context, questions, tokens, tokenizer, f"{what}, generated")
        return [
            all(
                tokenizer.decode(question.tokens[slice(*value)]).strip() in tokenizer.decode(answer)
                for value in question.answers
            )
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _by_depth(self, values: Sequence[float]) -> list[float]:
        """Means over the samples of each depth."""
        samples = self._wanted.samples
        return [sum(values[first : first + samples]) / samples for first in range(0, len(values), samples)]


def text_problems(config: RunConfig, wanted: HiddenNeedles, key: str) -> Iterator[str]:
    """No tokenizer, no text, lengths that no stage has, or fewer keys than needles; `key` is that of the section."""
    yield from length_problems(config, wanted, key)
    if wanted.haystack == "natural" and corpus_of(config, wanted) is None:
        yield (
            f"{key}.haystack: given 'natural', but there is no text; set data.validation or {key}.corpus, "
            "or haystack: synthetic"
        )
    if wanted.keys is not None and wanted.keys < wanted.needles:
        yield f"{key}.keys: given {wanted.keys}; allowed: at least needles {wanted.needles}"


class NeedleTexts:
    """Makes the questions of a recipe: pure functions of length, depth, number of the sample, and seed.

    `key` is that of the section `wanted`. Raises DataError without a tokenizer, for a damaged corpus, and for lengths
    that leave no room for the needles.
    """

    def __init__(self, config: RunConfig, wanted: HiddenNeedles, key: str) -> None:
        self.tokenizer = open_tokenizer(config, wanted)
        self._wanted = wanted
        self._key = key
        self._conversation = Conversation(config, wanted.chat, key)
        prefix = corpus_of(config, wanted)
        self._natural: NaturalText | None = None
        if wanted.haystack == "natural" and prefix is not None:
            corpus_key = f"{key}.corpus" if wanted.corpus else "data.validation"
            self._natural = NaturalText(config, prefix, self.tokenizer, corpus_key)

    def fits(self, length: int) -> bool:
        """Whether a sample of `length` tokens has a haystack at least as long as its needles."""
        return all(room >= needles for room, needles in (self._room(length, index) for index in self._samples))

    def check(self, length: int) -> None:
        """Raises DataError where a sample of `length` tokens has no room for its needles, or the corpus too little
        text for its haystack."""
        found = [self._room(length, index) for index in self._samples]
        room, needles = min(found, key=lambda pair: pair[0] - pair[1])
        if room < needles:
            raise DataError(
                f"{self._key}.lengths: given {length}, which leaves {max(room, 0)} tokens for the haystack, fewer "
                f"than the {needles} of what is hidden in it; allowed: at least {length - room + needles}"
            )
        if self._natural is not None:
            self._natural.tokens(max(room for room, _ in found), random.Random(self._wanted.seed))

    def questions(self, length: int) -> list[Question]:
        """The samples of `length` tokens, those of the first depth first. Raises DataError as `check` does."""
        self.check(length)
        return [self.question(length, depth, index) for depth in self._wanted.depths for index in self._samples]

    @property
    def _samples(self) -> range:
        return range(self._wanted.samples)

    def _room(self, length: int, index: int) -> tuple[int, int]:
        """Tokens of sample `index` that its haystack has, and those of its needles."""
        parts = self._parts(length, index)
        needles = sum(len(needle.tokens) for needle in parts.needles)
        answer = sum(len(part) for part, _ in parts.answer)
        return length - len(parts.head) - needles - len(parts.tail) - answer, needles

    def question(self, length: int, depth: float, index: int) -> Question:
        """Sample `index` of `length` tokens, with the first needle at `depth` %. Other depths have the same text."""
        parts = self._parts(length, index)
        room, _ = self._room(length, index)
        rng = random.Random(f"haystack {self._wanted.seed} {length} {index}")
        hay = noise_tokens(self.tokenizer, room) if self._natural is None else self._natural.tokens(room, rng)
        offsets = [round(depth / 100 * room), *(rng.randint(0, room) for _ in parts.needles[1:])]
        tokens = list(parts.head)
        begin: dict[int, int] = {}
        done = 0
        for number in sorted(range(len(offsets)), key=lambda number: (offsets[number], number)):
            tokens += hay[done : offsets[number]]
            done = offsets[number]
            begin[number] = len(tokens)
            tokens += parts.needles[number].tokens
        tokens += hay[done:] + parts.tail
        prompt_length = len(tokens)
        answers: list[TokenRange] = []
        sources: list[int] = []
        for part, counts in parts.answer:
            if counts:
                number = len(answers)
                value = parts.needles[number].value
                answers.append(TokenRange(len(tokens), len(tokens) + len(part)))
                sources += [begin[number] + min(value.start + at, value.stop - 1) for at in range(len(part))]
            tokens += part
        return Question(tokens, prompt_length, answers, sources)

    def _parts(self, length: int, index: int) -> "_Parts":
        """The tokens of sample `index` that are no hay: the same at every depth."""
        wanted = self._wanted
        rng = random.Random(f"needles {wanted.seed} {length} {index}")
        count = wanted.keys or wanted.needles
        keys = draw_keys(count, rng)
        values = draw_values(count, "numbers", rng)
        needles = [self._needle(key, value) for key, value in zip(keys, values, strict=True)]
        frame = needle_frame(keys[: wanted.needles], wanted.needles, "numbers")
        before, after = self._conversation.around(*frame)
        texts = separated(values[: wanted.needles])
        tail, *answer = encode_segments(self.tokenizer, [after, *(text for text, _ in texts)])
        counted = [(part, counts) for part, (_, counts) in zip(answer, texts, strict=True)]
        return _Parts(self.tokenizer.begin(before), needles, tail, counted)

    def _needle(self, key: str, value: str) -> "_HiddenNeedle":
        before, after = needle_parts(key, "numbers")
        first, second, last = encode_segments(self.tokenizer, [f"\n{before}", f" {value}", f"{after}\n"])
        return _HiddenNeedle(first + second + last, TokenRange(len(first), len(first) + len(second)))


@dataclass(frozen=True)
class _HiddenNeedle:
    """A needle's tokens, and which of them are the value."""

    tokens: list[int]
    value: TokenRange


@dataclass(frozen=True)
class _Parts:
    """The tokens of a sample without its haystack."""

    head: list[int]
    needles: list[_HiddenNeedle]
    tail: list[int]
    answer: list[tuple[list[int], bool]]
    """The parts of the answer, and whether each is a value."""


@dataclass(frozen=True)
class NeedleMap:
    """What was found with one attention; lists are by length first."""

    passed: list[list[float]]
    """[lengths, depths]: share of samples with every token of the answer right."""
    answers: list[list[float]]
    """[lengths, depths]: share of the needles, which differs where several are asked for."""
    selected: list[list[float | None]]
    """[lengths, layers]: share of heads, at the queries of the answer's tokens, that have selected the block of the
    token to copy; None: the layer attends to every block."""
    generated: list[list[float]] | None
    """[lengths, depths]: share of samples whose generated answer has every value; None: not generated."""

    @property
    def score(self) -> float:
        """Mean of `passed`."""
        return sum(map(sum, self.passed)) / sum(map(len, self.passed))

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        found = {"score": self.score, "passed": self.passed, "answers": self.answers, "selected": self.selected}
        return found | ({} if self.generated is None else {"generated": self.generated})

    def table(self, name: str, lengths: Sequence[int], depths: Sequence[float]) -> list[str]:
        """A line for each depth, a column for each length; then the selected blocks of each layer."""
        grids = {f"needle, {name}": self.passed} | ({f"generated, {name}": self.generated} if self.generated else {})
        lines = []
        for title, grid in grids.items():
            lines.append(f"{title:<24}" + "".join(f"{format_count(length, 1024):>8}" for length in lengths))
            for row, depth in enumerate(depths):
                lines.append(f"{f'depth {depth:g} %':<24}" + "".join(f"{column[row]:>8.2f}" for column in grid))
        for layer, shares in enumerate(zip(*self.selected, strict=True)):
            if any(value is not None for value in shares):
                cells = "".join(f"{'all' if value is None else f'{value:.2f}':>8}" for value in shares)
                lines.append(f"{f'layer {layer}: selected by':<24}{cells}  of heads")
        return lines
