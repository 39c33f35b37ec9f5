"""Tokens that begin and end the documents of a corpus and the turns of its conversations, and the chat template that
wrote these, as its sidecar says."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moba_train.checkpoint.manifest import read_meta
from moba_train.config.data import SourceConfig
from moba_train.data.indexed import corpus_file
from moba_train.data.tokenizer import tokenizer_file
from moba_train.foreign_files import read_foreign_json
from moba_train.tools.chat.load import parse_definition
from moba_train.tools.chat.template import TemplateDefinition
from moba_train.tools.hf.config import is_hf_folder
from moba_train.tools.saved_recipe import SavedRun
from moba_train.tools.text_tokenizer import GENERATION_CONFIG, read_object


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
    template: TemplateDefinition | None = None
    """Template of the conversations that were trained on last; None: not recorded."""
    other_templates: tuple[str, ...] = ()
    """Corpora of conversations that another template wrote."""

    @staticmethod
    def from_sidecar(info: dict[str, Any]) -> "CorpusMarks":
        """Marks in a sidecar (data/sidecar.py): `tokenizer`, `bos_id`, `eos_id`, `end_of_turn_id`, `loss_mask`,
        `chat_template`."""
        tokenizer = info.get("tokenizer")
        bos, eos, turn = (
            index if type(index) is int else None for index in map(info.get, ("bos_id", "eos_id", "end_of_turn_id"))
        )
        turns = frozenset() if turn is None else frozenset({turn})
        name = tokenizer if isinstance(tokenizer, str) else None
        template = parse_definition(info.get("chat_template"))
        return CorpusMarks(name, bos, eos, turns, info.get("loss_mask") is True, template)

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


def corpus_marks(saved: SavedRun, roots: Sequence[Path]) -> CorpusMarks:
    """Marks of the run's first corpus that records them, and of the conversations in all its corpora. The template is
    the one that the checkpoint has or, in one of an earlier version, that of the last stage's corpora. Corpora that do
    not exist, or do not lie below one of `roots`, are left out."""
    data = saved.config.data
    stages = saved.config.stages
    trained = [source for stage in stages[: saved.stage.index + 1][::-1] for source in stage.train or data.train]
    later = [source for stage in stages for source in stage.train or []]
    found = dict(_sidecars([*trained, *data.train, *later, *data.validation], roots))
    every = {path: CorpusMarks.from_sidecar(info) for path, info in found.items()}
    # In the order of the recipe, as a run begins with its first corpora.
    ordered = dict.fromkeys(source.path for source in (*data.train, *later, *data.validation))
    marks = next((every[path] for path in ordered if "eos_id" in found.get(path, {})), NO_MARKS)
    progress = None if is_hf_folder(saved.path) else read_meta(saved.path).get("progress")
    recorded = progress.get("chat_template") if isinstance(progress, dict) else None
    template = parse_definition(recorded)
    turns = [CorpusMarks.from_sidecar(recorded).ends_of_turns] if isinstance(recorded, dict) else []
    written = {source.path: every[source.path].template for source in trained if source.path in every}
    template = template or next((one for one in written.values() if one is not None), None)
    return replace(
        marks,
        ends_of_turns=frozenset[int]().union(*turns, *(one.ends_of_turns for one in every.values())),
        conversations=template is not None or any(one.conversations for one in every.values()),
        template=template,
        other_templates=tuple(path for path, one in written.items() if one is not None and one != template),
    )


def _sidecars(sources: Iterable[SourceConfig], roots: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and sidecar of each corpus that has one."""
    for path in dict.fromkeys(source.path for source in sources):
        try:
            info = read_foreign_json(corpus_file(path, "json"), roots=roots)
        except (OSError, ValueError):
            continue
        if isinstance(info, dict):
            yield path, info
