"""Texts of questions about a long context: words and needle sentences, natural or synthetic text, tokenizer, chat.

Needle sentences, questions and the repeated sentences are those of RULER (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA,
github.com/NVIDIA/RULER, Apache-2.0), because scores can only be compared if the words are the same. Lists of English
words replace the word packages that RULER downloads.
"""

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from moba_train.config.stages import Stage
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hashes
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationSetting
from moba_train.foreign_files import folder_roots, read_foreign_json, working_roots
from moba_train.tools.chat.load import Template, load_chat_template, parse_definition, recorded_template
from moba_train.tools.chat.template import TemplateDefinition
from moba_train.tools.inference.corpus_marks import CorpusMarks, ends_of_text
from moba_train.tools.needle.options import AnswersConfig
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer

_ADJECTIVES = """
able amber ancient arctic bitter black blank blind blue bold brave brief bright broad broken bronze brown busy
calm careful cheap civil clean clear clever cloudy coarse cold common cool coral crimson crisp cruel curly curved daily
damp dark dear deep dense distant double dry dull eager early eastern easy elder empty equal exact faint fair famous
fancy fast fierce final fine firm fixed flat foreign formal former fragile fresh frozen full gentle giant glad golden
grand gray great green hidden hollow honest huge humble hungry idle inner jolly keen large late lazy light little local
lonely long loose loud loyal lucky marble mellow mild minor misty modern narrow native neat noble northern odd old
open orange outer pale patient plain pleasant polite proud purple quick quiet rapid rare raw ready recent rich rigid
ripe rough round royal rural rusty sandy scarlet secret severe shallow sharp short shy silent silver simple slim slow
small smart smooth soft solid southern spare steady steep stern still strange strict strong sunny sweet swift tall tame
tender thick thin tidy tiny tough tropical upper useful vast violet vivid warm weak wealthy western wet white whole wide
wild wise wooden yellow young
"""
_NOUNS = """
acorn actor airport album anchor angle ankle apple apron arrow artist atlas autumn bakery balcony banana barrel basket
beach beard bell bench bicycle bird biscuit blanket boat bottle bowl bracelet branch bread brick bridge broom brother
bucket button cabin cable camel camera candle canvas canyon captain carpet carrot castle cattle cave ceiling chair
chapel cherry chimney circle clock cloud coat coffee collar comet compass copper corner cottage cotton cousin cradle
crane crown curtain cushion daisy dancer desert desk dinner dragon drawer drum eagle easel elbow engine envelope fabric
falcon farmer feather fence ferry fiddle flag flame flute forest fossil fountain fox garden garlic gate ginger glacier
glove goat grape guitar hammer harbor hat hawk helmet hill honey horse hotel insect island ivory jacket jar jewel
judge jungle kettle kitchen kite knee ladder lake lamp lantern laundry lawyer leaf lemon letter library lion lizard
lobster locket lumber machine magnet mango map market meadow melon mirror monkey moon morning motor mountain mouse
museum mushroom needle nest nurse oasis ocean office olive onion orchard otter oven owl paddle painter palace panther
paper parrot pasture peach pearl pebble pencil pepper piano pigeon pillow pilot planet plate pocket pond pony porch
potato prairie puzzle rabbit radio raft railway rain ribbon river road robin rocket roof rope saddle sailor salmon
sandal saucer scarf school sculptor shadow shelter shirt shovel sister sleeve snow soldier sparrow spider spoon spring
stable staircase statue stone stove stream summer sweater table tailor teacher temple tent theater thunder tiger tomato
tower tractor train tree trumpet tulip tunnel turtle umbrella valley vase village violin wagon waiter wallet walnut
water weaver whale wheel whistle window winter wolf zebra
"""
_VERBS = """
admire agree allow answer appear arrive ask bake balance become begin behave believe belong borrow bring build burn
carry catch celebrate change choose climb close collect compare complain consider copy cough count cover create cross
dance decide deliver describe discover divide draw dream drink drive earn eat enjoy enter escape examine expect explain
explore fall feed fetch find finish float follow forget forgive gather give glance greet grow guess guide happen hear
hide hope hunt imagine improve include invent invite jump knock laugh learn leave lend lift listen manage measure
mention move notice obey observe offer paint perform plant practice prefer prepare pretend promise protect prove provide
publish receive refuse remain remember repair repeat replace rescue return sail search seem settle share shout sing sit
skate sleep smile solve speak spell stand stay suggest swim teach thank think travel trust try understand visit wait
walk wander wash watch whisper wonder write
"""

ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()
VERBS = _VERBS.split()

PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
"""Names such as `amber-acorn`, all different: keys of needles."""

WORDS = [*dict.fromkeys([*ADJECTIVES, *NOUNS, *VERBS]), *PAIRS]
"""All different: single words first, then pairs."""

SINGLE_WORDS = len(WORDS) - len(PAIRS)
"""Number of single words in `WORDS`."""

ValueType = Literal["numbers", "uuids"]


class NeedleFrame(NamedTuple):
    """The text around a haystack."""

    before: str
    after: str
    answer: str
    """Beginning of the answer."""


def needle_sentence(key: str, value: str, kind: ValueType) -> str:
    """The sentence that hides `value`."""
    return needle_parts(key, kind)[0] + f" {value}" + needle_parts(key, kind)[1]


def needle_parts(key: str, kind: ValueType) -> tuple[str, str]:
    """The sentence up to the space before the value, and what follows the value."""
    return f"One of the special magic {kind} for {key} is:", "."


def needle_frame(keys: Sequence[str], values: int, kind: ValueType) -> NeedleFrame:
    """The question for all values of `keys`, `values` in total."""
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    if values == 1:
        some, thing, verb, are = "A", kind[:-1], "is", "is"
    else:
        some, thing, verb, are = "Some", kind, "are", "are all"
    before = (
        f"{some} special magic {thing} {verb} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {thing} afterwards.\n"
    )
    after = f"\nWhat {are} the special magic {thing} for {query} mentioned in the provided text?"
    return NeedleFrame(before, after, f"The special magic {thing} for {query} mentioned in the provided text {verb}")


def separated(values: Sequence[str], comma: str = ",") -> list[tuple[str, bool]]:
    """Parts of an answer's text, each with a flag: True for a value, False for a comma between values."""
    parts: list[tuple[str, bool]] = []
    for index, value in enumerate(values):
        if index and comma:
            parts.append((comma, False))
        parts.append((f" {value}", True))
    return parts


def draw_keys(count: int, rng: random.Random) -> list[str]:
    """Different keys such as `amber-acorn`."""
    return rng.sample(PAIRS, count)


def draw_values(count: int, kind: ValueType, rng: random.Random) -> list[str]:
    """Different values: numbers of seven digits, or UUIDs."""
    if kind == "numbers":
        return [str(number) for number in rng.sample(range(10**6, 10**7), count)]
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def stage_lengths(options: AnswersConfig, stage: Stage) -> list[int]:
    """Lengths that `stage` is evaluated with, in tokens, ascending."""
    if options.lengths is None:
        return [length for length in (stage.seq_len // 4, stage.seq_len // 2, stage.seq_len) if length]
    return sorted({length for length in options.lengths if length <= stage.seq_len})


def length_problems(options: AnswersConfig, setting: EvaluationSetting, key: str) -> Iterator[str]:
    """No tokenizer, and lengths beyond the longest stage's. `key` is that of the section."""
    if setting.tokenizer is None:
        yield f"{key}: needs the model's tokenizer; set data.tokenizer"
    longest = setting.longest_length
    for length in options.lengths or ():
        if length > longest:
            yield f"{key}.lengths: given {length}; allowed: at most {longest}, the longest seq_len that is trained"


class QuestionTokenizer:
    """The model's tokenizer, by which questions begin as the documents did that the model was trained on.

    path: of data.tokenizer
    model_vocab_size: rows of the model's embedding
    info: sidecar of the corpus that the text of questions comes from; empty if there is none
    chat: True if special tokens that a text spells out become these tokens, as in fine-tuning; a chat template spells
        them out

    Raises DataError without a tokenizer, and for one with more tokens than the model.
    """

    def __init__(self, path: str | None, model_vocab_size: int, info: dict[str, Any], chat: bool) -> None:
        if path is None:
            raise DataError("data.tokenizer: not set; questions about a text need the tokenizer of the model")
        self.path = path
        self.model_vocab_size = model_vocab_size
        self._text = load_text_tokenizer(path)
        self._prompts = ChatTokenizer(self._text) if chat else self._text
        self._marks = CorpusMarks.from_sidecar(info)
        self.vocab_size = self._text.vocab_size
        self.eos_id = self._text.eos_id
        if self.vocab_size > model_vocab_size:
            raise DataError(
                f"data.tokenizer: {path} has {self.vocab_size} tokens, more than model.vocab_size {model_vocab_size}; "
                "give the tokenizer that the model was trained with"
            )

    @property
    def marks(self) -> frozenset[int]:
        """The tokens at the ends of documents, which are no text."""
        return frozenset(mark for mark in (self.eos_id, self._marks.bos_id, self._marks.eos_id) if mark is not None)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generated answer, of a text or of a turn."""
        roots = folder_roots(tokenizer_file(self.path).parent)
        return self.marks | self._marks.ends | {*ends_of_text(self.path, roots)}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` within a prompt."""
        return self._prompts.encode(text)

    def begin(self, text: str) -> list[int]:
        """Token ids of `text` at the beginning of a prompt."""
        return self._marks.begin(self.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return self._text.decode(tokens)


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Sentences that RULER repeats around needles."""
_CONTEXT = "{{context}}"
"""Placeholder of the context while a chat template is rendered."""


def open_tokenizer(setting: EvaluationSetting, chat: bool) -> QuestionTokenizer:
    """The model's tokenizer, for questions about the text of data.validation, by its chat template or not. Raises
    DataError without one, and for a damaged corpus."""
    prefix = corpus_of(setting)
    info = (IndexedDataset(prefix).info if prefix is not None else None) or {}
    return QuestionTokenizer(setting.tokenizer, setting.model.vocab_size, info, chat)


def corpus_of(setting: EvaluationSetting) -> str | None:
    """Prefix of the corpus that text comes from, the first of data.validation; None if there is none."""
    return setting.validation[0].path if setting.validation else None


class NaturalText:
    """Text of a tokenised corpus: consecutive documents, from a random one on, without the tokens at their ends.

    Raises DataError when the corpus is damaged, or was made with another tokenizer.
    """

    def __init__(self, prefix: str, tokenizer: QuestionTokenizer) -> None:
        self.prefix = prefix
        self._tokenizer = tokenizer
        self._marks = np.array(sorted(tokenizer.marks), dtype=np.int64)
        self._corpus = IndexedDataset(prefix)
        self._corpus.check_vocabulary(tokenizer.model_vocab_size)
        made_with = (self._corpus.info or {}).get("tokenizer_sha256")
        if made_with is not None and made_with not in tokenizer_hashes(tokenizer.path):
            raise DataError(
                f"data.validation: the corpus {prefix} was made with another tokenizer than data.tokenizer "
                f"{tokenizer.path}; give a corpus of the same tokenizer"
            )

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        """`count` tokens of text. Raises DataError when the corpus has fewer."""
        found: list[int] = []
        first = rng.randrange(max(self._corpus.documents, 1))
        for step in range(self._corpus.documents):
            if len(found) >= count:
                break
            document = (first + step) % self._corpus.documents
            length = min(int(self._corpus.document_lengths[document]), count - len(found) + len(self._marks))
            ids = self._corpus.document(document, 0, length).astype(np.int64)
            found += ids[~np.isin(ids, self._marks)].tolist()
        if len(found) < count:
            raise DataError(
                f"data.validation: the corpus {self.prefix} has {len(found)} tokens of text, fewer than the {count} of "
                "a haystack; give a longer corpus, or shorter lengths"
            )
        if found and not 0 <= min(found) <= max(found) < self._tokenizer.model_vocab_size:
            raise DataError(f"data.validation: the corpus {self.prefix} has token ids outside model.vocab_size")
        return found[:count]

    def words(self, count: int, rng: random.Random) -> list[str]:
        """The words of `count` tokens of text. Raises DataError when the corpus has fewer."""
        return re.split(r"\s+", self._tokenizer.decode(self.tokens(count, rng)).strip())


def _trained_template(setting: EvaluationSetting) -> TemplateDefinition | None:
    """Chat template that wrote the conversations of a run, by the sidecars of its corpora. Corpora for training are
    those of a recipe that may come from elsewhere."""
    sources = {source.path: working_roots() for source in setting.stage.sources}
    for path, roots in (sources | {source.path: None for source in setting.validation}).items():
        with suppress(OSError, ValueError):
            info = read_foreign_json(corpus_file(path, "json"), roots=roots)
            if isinstance(info, dict) and (definition := parse_definition(info.get("chat_template"))):
                return definition
    return None


class Conversation:
    """The text around a context: as it is, or as a chat template renders it.

    setting: its corpora record the template; if they do not, that in the folder of data.tokenizer is used
    chat: True to use the template
    key: that of the section which asks, for messages

    Raises DataError when `chat` is set and there is no template.
    """

    def __init__(self, setting: EvaluationSetting, chat: bool, key: str) -> None:
        self._key = f"{key}.chat"
        self._template: Template | None = None
        if not chat:
            return
        definition = _trained_template(setting)
        path = Path(setting.tokenizer or "")
        folder = path if path.is_dir() else path.parent
        try:
            self._template = recorded_template(definition) if definition else load_chat_template(str(folder))
        except DataError as error:
            raise DataError(
                f"{self._key}: given true, but the folder of data.tokenizer gives none: {error}; set false, or name a "
                "tokenizer in the folder of a model that has one"
            ) from error

    def around(self, before: str, after: str, answer: str) -> tuple[str, str]:
        """Text before and after the context. The texts `before` and `after` it are the user's, and `answer` is the
        beginning of the answer, which loses its leading space in a chat. Raises DataError for a template that does not
        repeat a message."""
        if self._template is None:
            return before, after + answer
        try:
            message = {"role": "user", "content": f"{before}{_CONTEXT}{after}"}
            text = self._template.render([message], add_generation_prompt=True)
        except ValueError as error:
            raise DataError(f"{self._key}: {error}") from error
        head, found, tail = text.partition(_CONTEXT)
        if not found:
            raise DataError(f"{self._key}: the chat template does not repeat the user's message as it is")
        return head, tail + answer.lstrip()
