"""Needle in a haystack: share of sentences that a model finds in a long text, by their depth in it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moba_train.attention.layout import TokenRange
from moba_train.config.base import format_count
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.tools.needle.answers import (
    Question,
    QuestionsByLength,
    SelectedBlocks,
    encode_segments,
    generated_answers,
    predicted_answers,
    share,
)
from moba_train.tools.needle.full_answers import answer_modes, answer_problems
from moba_train.tools.needle.haystack import (
    Conversation,
    NaturalText,
    draw_keys,
    draw_values,
    length_problems,
    needle_frame,
    needle_parts,
    open_tokenizer,
    separated,
)
from moba_train.tools.needle.options import HiddenNeedles, NeedleConfig

GENERATED = 16
"""Tokens that are generated for each needle, at least: numbers have seven digits."""


class Needle(QuestionsByLength[NeedleConfig]):
    """Share of the samples, over lengths and depths, in which every token of the answer is the most likely one."""

    name = "needle"
    Options = NeedleConfig
    data_name = "needle_map"
    numbers = frozenset({"needle"})
    numbers_against_full = frozenset({"needle_full"})

    def __init__(self, options: NeedleConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self._trained_length = setting.trained_length
        self._texts = NeedleTexts(options, setting, self.key, options.chat)
        self.choose_lengths(setting, self._texts.fits, self._texts.check)

    @classmethod
    def problems(cls, options: NeedleConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Problems of the texts, layers that cannot answer so, and generation with tensor parallelism."""
        yield from text_problems(options, setting, cls.key)
        yield from answer_problems(options.answer, setting, cls.key)
        if options.generate and setting.tp > 1:
            yield f"{cls.key}.generate: given true, which parallel.tp {setting.tp} cannot do; set it to false"

    @classmethod
    def pipeline_problem(cls, options: NeedleConfig) -> tuple[str, str] | None:
        """Generation, and answers with full attention."""
        if options.answer == "full":
            return f"{cls.key}.answer: given 'full'", "set it to own"
        return (f"{cls.key}.generate: given true", "set it to false") if options.generate else None

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`needle` with the own attention; `needle_full` with full attention on the same weights."""
        options = self._options
        questions = {length: self._texts.questions(length) for length in self.lengths}
        maps = {
            name: self._map(context, questions, name, in_full)
            for name, in_full in answer_modes(context, options.answer)
        }
        own = maps[context.own]
        numbers = {"needle": own.score}
        count = sum(map(len, questions.values()))
        message = f"needle {own.score:.3f} of {count} samples with {context.own} attention"
        if "full" in maps and context.own != "full":
            numbers["needle_full"] = maps["full"].score
            message += f", {maps['full'].score:.3f} with full attention on the same weights"
        data = {
            "attention": context.own,
            "trained_length": self._trained_length,
            "lengths": self.lengths,
            "depths": options.depths,
            "samples": options.samples,
            "needles": options.needles,
            "tokens": sum(len(question.tokens) for found in questions.values() for question in found),
            "maps": {name: found.to_json() for name, found in maps.items()},
        }
        table = [line for name, found in maps.items() for line in found.table(name, self.lengths, options.depths)]
        table.append(f"{options.samples} samples per cell; trained on {self._trained_length} tokens")
        return EvaluationResult(numbers, message, [*table, message], data)

    def _map(
        self, context: EvaluationContext, questions: Mapping[int, list[Question]], name: str, in_full: bool
    ) -> "NeedleMap":
        """Findings of the model with its present attention, or `in_full`: with full attention for the answers."""
        found = NeedleMap([], [], [], [], [] if self._options.generate else None)
        for length, asked in questions.items():
            blocks = SelectedBlocks(context.model.config.layers, context.device)
            what = f"needle, {name}, {format_count(length, 1024)}"
            with blocks.observing(context):
                predicted = predicted_answers(context, asked, length, what, blocks, in_full)
            right = [question.right(tokens) for question, tokens in zip(asked, predicted, strict=True)]
            passed = [all(answers) for answers in right]
            found.passed.append(self._by_depth(passed))
            found.outcomes.append(["".join(str(int(one)) for one in some) for some in self._of_depths(passed)])
            found.answers.append(self._by_depth([share(answers) for answers in right]))
            found.selected.append(blocks.shares())
            if found.generated is not None:
                found.generated.append(self._by_depth(self._generated(context, asked, what, in_full)))
        return found

    def _generated(
        self, context: EvaluationContext, questions: Sequence[Question], what: str, in_full: bool
    ) -> list[bool]:
        """Verdict on each question: True if the generated answer has every value."""
        tokenizer = self._texts.tokenizer
        tokens = GENERATED * self._options.needles + max(q.places[-1] + 1 - q.prompt_length for q in questions)
        answers = generated_answers(
            context, questions, tokens, tokenizer, f"{what}, generated", in_full, tokenizer.ends
        )
        return [
            all(
                tokenizer.decode(question.tokens[slice(*value)]).strip() in tokenizer.decode(answer)
                for value in question.answers
            )
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _by_depth(self, values: Sequence[float]) -> list[float]:
        """Means over the samples of each depth."""
        return [sum(some) / len(some) for some in self._of_depths(values)]

    def _of_depths(self, values: Sequence[float]) -> Iterator[Sequence[float]]:
        samples = self._options.samples
        return (values[first : first + samples] for first in range(0, len(values), samples))


def text_problems(options: HiddenNeedles, setting: EvaluationSetting, key: str) -> Iterator[str]:
    """No tokenizer, no text, or lengths that no stage has. `key` is that of the section."""
    yield from length_problems(options, setting, key)
    if not setting.validation:
        yield f"{key}: needs text to hide needles in; set data.validation"


class NeedleTexts:
    """Questions of an evaluation: pure functions of length, depth and number of the sample.

    key: that of the section `options`
    chat: True to ask by the chat template

    Raises DataError without a tokenizer, for a damaged corpus, and for lengths
    that leave no room for the needles.
    """

    def __init__(self, options: HiddenNeedles, setting: EvaluationSetting, key: str, chat: bool = False) -> None:
        self.tokenizer = open_tokenizer(setting, chat)
        self._options = options
        self._key = key
        self._conversation = Conversation(setting, chat, key)
        self._natural = NaturalText(setting.validation[0].path, self.tokenizer)

    def fits(self, length: int) -> bool:
        """True if a sample of `length` tokens has a haystack at least as long as its needles."""
        return all(room >= needles for room, needles in (self._room(length, index) for index in self._samples))

    def check(self, length: int) -> None:
        """Raise DataError when a sample of `length` tokens has no room for its needles, or the corpus has too little
        text for its haystack."""
        found = [self._room(length, index) for index in self._samples]
        room, needles = min(found, key=lambda pair: pair[0] - pair[1])
        if room < needles:
            raise DataError(
                f"{self._key}.lengths: given {length}, which leaves {max(room, 0)} tokens for the haystack, fewer "
                f"than the {needles} of what is hidden in it; allowed: at least {length - room + needles}"
            )
        self._natural.tokens(max(room for room, _ in found), random.Random(0))

    def questions(self, length: int) -> list[Question]:
        """Samples of `length` tokens, those of the first depth first. Raises DataError as `check` does."""
        self.check(length)
        return [self.question(length, depth, index) for depth in self._options.depths for index in self._samples]

    @property
    def _samples(self) -> range:
        return range(self._options.samples)

    def _room(self, length: int, index: int) -> tuple[int, int]:
        """Numbers of tokens of sample `index`: those of its haystack, and those of its needles."""
        parts = self._parts(length, index)
        needles = sum(len(needle.tokens) for needle in parts.needles)
        answer = sum(len(part) for part, _ in parts.answer)
        return length - len(parts.head) - needles - len(parts.tail) - answer, needles

    def question(self, length: int, depth: float, index: int) -> Question:
        """Sample `index` of `length` tokens, with the first needle at `depth` %. Other depths have the same text."""
        parts = self._parts(length, index)
        room, _ = self._room(length, index)
        rng = random.Random(f"haystack 0 {length} {index}")
        hay = self._natural.tokens(room, rng)
        offsets = [round(depth / 100 * room), *(rng.randint(0, room) for _ in parts.needles[1:])]
        tokens = list(parts.head)
        begin: dict[int, int] = {}
        done = 0
        for number in sorted(range(len(offsets)), key=lambda number: (offsets[number], number)):
            tokens += hay[done : offsets[number]]
            done = offsets[number]
            begin[number] = len(tokens)
            tokens += parts.needles[number].tokens
        tokens += hay[done:]
        text_length = len(tokens)
        tokens += parts.tail
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
        return Question(tokens, prompt_length, answers, sources, text_length)

    def _parts(self, length: int, index: int) -> "_Parts":
        """Tokens of sample `index` that are no hay, which are equal at every depth."""
        options = self._options
        rng = random.Random(f"needles 0 {length} {index}")
        keys = draw_keys(options.needles, rng)
        values = draw_values(options.needles, "numbers", rng)
        needles = [self._needle(key, value) for key, value in zip(keys, values, strict=True)]
        frame = needle_frame(keys, options.needles, "numbers")
        before, after = self._conversation.around(frame.before, frame.after, f" {frame.answer}")
        texts = separated(values)
        tail, *answer = encode_segments(self.tokenizer, [after, *(text for text, _ in texts)])
        counted = [(part, counts) for part, (_, counts) in zip(answer, texts, strict=True)]
        return _Parts(self.tokenizer.begin(before), needles, tail, counted)

    def _needle(self, key: str, value: str) -> "_HiddenNeedle":
        before, after = needle_parts(key, "numbers")
        first, second, last = encode_segments(self.tokenizer, [f"\n{before}", f" {value}", f"{after}\n"])
        return _HiddenNeedle(first + second + last, TokenRange(len(first), len(first) + len(second)))


@dataclass(frozen=True)
class _HiddenNeedle:
    """A needle's tokens, and the range of them that is the value."""

    tokens: list[int]
    value: TokenRange


@dataclass(frozen=True)
class _Parts:
    """Tokens of a sample without its haystack."""

    head: list[int]
    needles: list[_HiddenNeedle]
    tail: list[int]
    answer: list[tuple[list[int], bool]]
    """Parts of the answer, each with True if it is a value."""


@dataclass(frozen=True)
class NeedleMap:
    """Findings with one attention; the first index of each list is the length."""

    passed: list[list[float]]
    """[lengths, depths]: share of samples with every token of the answer right."""
    outcomes: list[list[str]]
    """[lengths, depths]: the samples, 1 for one that passed, else 0; models that get the same ones compare by them."""
    answers: list[list[float]]
    """[lengths, depths]: share of needles found, which differs from `passed` if several are asked for."""
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
        found = {"score": self.score, "passed": self.passed, "outcomes": self.outcomes, "answers": self.answers}
        found["selected"] = self.selected
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
