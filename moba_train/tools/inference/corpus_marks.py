"""Tokens that begin and end the documents of a corpus and the turns of its conversations, as its sidecar says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moba_train.config.data import DataConfig
from moba_train.config.schema import StageConfig
from moba_train.data.indexed import corpus_file
from moba_train.data.tokenizer import GENERATION_CONFIG, read_object, tokenizer_file
from moba_train.foreign_files import read_foreign_json


@dataclass(frozen=True)
class CorpusMarks:
    """The tokenizer of a corpus, and the tokens at the ends of its documents and of the turns of its conversations."""

    tokenizer: str | None = None
    """None: no corpus records the tokens that begin and end its documents."""
    bos_id: int | None = None
    """None: documents begin with their text."""
    eos_id: int | None = None
    """None: documents end with their text."""
    ends_of_turns: frozenset[int] = frozenset()
    """Tokens that end an answer in conversations."""
    conversations: bool = False
    """True if there are conversations, in whose text chat templates spell out special tokens."""

    @staticmethod
    def from_sidecar(info: dict[str, Any]) -> "CorpusMarks":
        """Marks in a sidecar (data/sidecar.py): `tokenizer`, `bos_id`, `eos_id`, `end_of_turn_id`, `loss_mask`."""
        tokenizer = info.get("tokenizer")
        bos, eos, turn = (
            index if type(index) is int else None for index in map(info.get, ("bos_id", "eos_id", "end_of_turn_id"))
        )
        turns = frozenset() if turn is None else frozenset({turn})
        name = tokenizer if isinstance(tokenizer, str) else None
        return CorpusMarks(name, bos, eos, turns, info.get("loss_mask") is True)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a document or a turn."""
        return self.ends_of_turns if self.eos_id is None else self.ends_of_turns | {self.eos_id}

    def spelt_out(self, template: bool) -> bool:
        """True if special tokens that a text spells out are these tokens: in a run with conversations or, if no corpus
        is known, with a tokenizer that has a chat `template`."""
        return self.conversations or (self.tokenizer is None and template)

    def begin(self, tokens: list[int]) -> list[int]:
        """`tokens` at the beginning of a document: after `bos_id`, unless they begin with it already."""
        return tokens if self.bos_id is None or tokens[:1] == [self.bos_id] else [self.bos_id, *tokens]


NO_MARKS = CorpusMarks()


def ends_of_text(path: str | Path, roots: Sequence[Path] | None = None) -> list[int]:
    """Token ids that end a generated text, from the generation_config.json in the folder of the tokenizer at `path`;
    empty without the file.

    Raises DataError when the file cannot be read, or does not lie below one of `roots`.
    """
    return token_ids(read_object(tokenizer_file(path).with_name(GENERATION_CONFIG), roots).get("eos_token_id"))


def token_ids(value: Any) -> list[int]:
    """Token ids under a key such as `eos_token_id` of a generation_config.json: one, a list, or none."""
    return [index for index in (value if isinstance(value, list) else [value]) if type(index) is int]


def corpus_marks(data: DataConfig, stages: Sequence[StageConfig], roots: Sequence[Path]) -> CorpusMarks:
    """Marks of the run's first corpus that records them, and of the conversations in all its corpora. Corpora that do
    not exist, or do not lie below one of `roots`, are left out."""
    sidecars = list(_sidecars(data, stages, roots))
    every = [CorpusMarks.from_sidecar(info) for info in sidecars]
    marks = next((found for info, found in zip(sidecars, every, strict=True) if "eos_id" in info), NO_MARKS)
    turns = frozenset[int]().union(*(found.ends_of_turns for found in every))
    return replace(marks, ends_of_turns=turns, conversations=any(found.conversations for found in every))


def _sidecars(data: DataConfig, stages: Sequence[StageConfig], roots: Sequence[Path]) -> Iterator[dict[str, Any]]:
    own = [source for stage in stages for source in stage.train or []]
    for path in dict.fromkeys(source.path for source in (*data.train, *own, *data.validation)):
        try:
            info = read_foreign_json(corpus_file(path, "json"), roots=roots)
        except (OSError, ValueError):
            continue
        if isinstance(info, dict):
            yield info
