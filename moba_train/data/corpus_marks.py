"""How the documents of a corpus begin and end, and the turns of its conversations, as its sidecar says."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.foreign_files import read_foreign_json


@dataclass(frozen=True)
class CorpusMarks:
    """The tokenizer of a corpus, and the tokens at the ends of its documents and of the turns of its conversations."""

    tokenizer: str | None = None
    """None: no corpus records how its documents begin and end."""
    bos_id: int | None = None
    """None: documents begin with their text."""
    eos_id: int | None = None
    """None: documents end with their text."""
    ends_of_turns: frozenset[int] = frozenset()
    """What ends an answer in conversations."""
    conversations: bool = False
    """Whether there are conversations, in whose text chat templates spell out special tokens."""

    @staticmethod
    def from_sidecar(info: dict[str, Any]) -> "CorpusMarks":
        """From a sidecar (data/sidecar.py): `tokenizer`, `bos_id`, `eos_id`, `end_of_turn_id`, `loss_mask`."""
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
        """Whether special tokens that a text spells out are these tokens: in a run with conversations or, where no
        corpus is known, with a tokenizer that has a chat template."""
        return self.conversations or (self.tokenizer is None and template)

    def begin(self, tokens: list[int]) -> list[int]:
        """`tokens` as a document begins: with `bos_id`, unless they have it already."""
        return tokens if self.bos_id is None or tokens[:1] == [self.bos_id] else [self.bos_id, *tokens]


NO_MARKS = CorpusMarks()


def corpus_marks(config: RunConfig, roots: Sequence[Path]) -> CorpusMarks:
    """Marks of the run's first corpus that records them, and of the conversations in all its corpora; corpora that are
    not there, or not below one of `roots`, are passed over."""
    sidecars = list(_sidecars(config, roots))
    every = [CorpusMarks.from_sidecar(info) for info in sidecars]
    marks = next((found for info, found in zip(sidecars, every, strict=True) if "eos_id" in info), NO_MARKS)
    turns = frozenset[int]().union(*(found.ends_of_turns for found in every))
    return replace(marks, ends_of_turns=turns, conversations=any(found.conversations for found in every))


def _sidecars(config: RunConfig, roots: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in dict.fromkeys(_corpora(config)):
        try:
            info = read_foreign_json(corpus_file(path, "json"), roots=roots)
        except (OSError, ValueError):
            continue
        if isinstance(info, dict):
            yield info


def _corpora(config: RunConfig) -> Iterable[str]:
    stages = (source for stage in config.stages for source in stage.train or [])
    return (source.path for source in (*config.data.train, *stages, *config.data.validation))
