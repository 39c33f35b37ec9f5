"""How the documents of a corpus begin and end, as its sidecar says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.foreign_files import read_foreign_json


@dataclass(frozen=True)
class CorpusMarks:
    """The tokenizer of a corpus, and the tokens at the ends of its documents; ids are None where there are none."""

    tokenizer: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None

    @staticmethod
    def from_sidecar(info: dict[str, Any]) -> "CorpusMarks":
        """By the keys `tokenizer`, `bos_id` and `eos_id` of a sidecar (data/sidecar.py)."""
        tokenizer = info.get("tokenizer")
        bos, eos = (index if type(index) is int else None for index in (info.get("bos_id"), info.get("eos_id")))
        return CorpusMarks(tokenizer if isinstance(tokenizer, str) else None, bos, eos)

    def begin(self, tokens: list[int]) -> list[int]:
        """`tokens` as a document begins: with `bos_id`, unless they have it already."""
        return tokens if self.bos_id is None or tokens[:1] == [self.bos_id] else [self.bos_id, *tokens]


NO_MARKS = CorpusMarks()


def corpus_marks(config: RunConfig, roots: Sequence[Path]) -> CorpusMarks:
    """Marks of the run's first corpus that records them; corpora that are not there, or not below one of `roots`, are
    passed over."""
    for path in _corpora(config):
        try:
            info = read_foreign_json(corpus_file(path, "json"), roots=roots)
        except (OSError, ValueError):
            continue
        if isinstance(info, dict) and "eos_id" in info:
            return CorpusMarks.from_sidecar(info)
    return NO_MARKS


def _corpora(config: RunConfig) -> Iterable[str]:
    stages = (source for stage in config.stages for source in stage.train or [])
    return (source.path for source in (*config.data.train, *stages, *config.data.validation))
