"""Conversations of more than seq_len tokens: refused, or split, cut or dropped as the recipe says, and counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_tools.cli import app as data_app
from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.data import LongConversations, SourceConfig
from moba_train.config.load import load_config
from moba_train.data.loss_mask import LossNorm, mask_prefix
from moba_train.data.samples import StageData
from moba_train.errors import CheckpointError, ConfigError, DataError
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.run.progress import Progress, check_resumable, data_plan
from moba_train.tools.cli import app
from tests.commands import run_app

LENGTHS = [5, 8, 12, 20]
"""Two of them longer than the samples of 8 tokens."""
MODELS = Path(__file__).parents[2] / "configs/models"


def write_corpus(prefix: Path, lengths: list[int], *, masked: bool = True) -> str:
    """Conversations whose tokens are 10, 11, ... in the first, 40, 41, ... in the second; odd tokens carry loss."""
    with (
        IndexedDatasetWriter(prefix, np.uint16) as corpus,
        IndexedDatasetWriter(mask_prefix(str(prefix)) if masked else f"{prefix}.unused", np.uint8) as masks,
    ):
        for number, length in enumerate(lengths):
            tokens = 10 + 30 * number + np.arange(length)
            corpus.add_document(tokens)
            masks.add_document(tokens % 2)
    return str(prefix)


@pytest.fixture
def chat(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "chat", LENGTHS)


def stage(
    path: str, long: LongConversations, packing: Any = "best_fit", norm: LossNorm = "token", **source: int
) -> StageData:
    sources = [SourceConfig(path=path, **source)]
    return StageData(sources, 8, 40, 0, {}, 200, packing, norm, long)


def read_parts(data: StageData) -> set[tuple[int, int, int]]:
    """Document, start and stop of everything that is read."""
    return {part[1:] for index in range(data.sequences) for part in data.sample(index).parts}


SAID = "2 of 4 conversations of {} are longer than the 8 tokens of a sample, the longest has 20"


def test_they_are_refused_by_default(chat: str) -> None:
    with pytest.raises(DataError, match=f"{SAID.format(chat)}; set a larger seq_len, or data.long_conversations to"):
        stage(chat, "error")
    assert stage(chat, "error", below_length=9).warnings(1) == [], "none that is read is longer"


@pytest.mark.parametrize(
    ("long", "said", "parts"),
    [
        ("split", "later parts train without what comes before", [(2, 8, 12), (3, 8, 16), (3, 16, 20)]),
        ("truncate", "the rest of them is not trained on", []),
        ("drop", "they are not trained on", []),
    ],
)
def test_they_are_treated_as_the_recipe_says_and_counted(
    chat: str, long: LongConversations, said: str, parts: list[tuple[int, int, int]]
) -> None:
    data = stage(chat, long)
    (warning,) = data.warnings(1)
    assert warning.startswith(f"{SAID.format(chat)}: ")
    assert said in warning
    beginnings = [(2, 0, 8), (3, 0, 8)] if long != "drop" else []
    assert read_parts(data) == {(0, 0, 5), (1, 0, 8), *beginnings, *parts}
    assert data.streams[0].tokens == {"split": 45, "truncate": 29, "drop": 13}[long]


def test_concatenation_reads_the_same_tokens(chat: str) -> None:
    dropped, cut = (
        {token for index in range(40) for token in stage(chat, long, "concat").sample(index).tokens.tolist()}
        for long in ("drop", "truncate")
    )
    whole = {*range(10, 15), *range(40, 48)}
    assert dropped == whole
    assert cut == whole | {*range(70, 78), *range(100, 108)}


def test_concatenation_is_named_because_it_cuts_conversations_of_any_length(chat: str, tmp_path: Path) -> None:
    (warning,) = stage(chat, "error", "concat", below_length=9).warnings(1)
    assert warning.startswith(f"data.packing: concat cuts the conversations of {chat}[0:9] wherever a sample ends")
    assert stage(write_corpus(tmp_path / "text", LENGTHS, masked=False), "error", "concat").warnings(1) == []


def test_a_conversation_that_is_cut_counts_once_by_sequence(chat: str) -> None:
    """Each weighs 1 in total, by the tokens with loss that are left of it."""
    data = stage(chat, "truncate", norm="sequence")
    samples = [data.sample(index) for index in range(4)]
    assert sorted(part[1] for sample in samples for part in sample.parts) == [0, 1, 2, 3], "each once"
    weights = {
        sample.parts[0].document: sum(sample.loss_weight.tolist()) for sample in samples if len(sample.parts) == 1
    }
    assert weights == pytest.approx(dict.fromkeys(weights, 1.0))
    assert {2, 3} <= weights.keys()


def test_nothing_changes_where_none_is_long(chat: str) -> None:
    kept = stage(chat, "split", below_length=9)
    for long in ("truncate", "drop", "error"):
        data = stage(chat, long, below_length=9)
        assert data.stream_names == kept.stream_names
        assert read_parts(data) == read_parts(kept)


def test_positions_of_streams_that_read_other_tokens_have_other_names(chat: str) -> None:
    """So that a later stage with longer samples does not go on at a position of other documents."""
    assert len({stage(chat, long).stream_names[0] for long in ("split", "truncate", "drop")}) == 3


def test_a_source_of_long_conversations_alone_cannot_be_dropped(chat: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 2 conversations"):
        stage(chat, "drop", min_length=9)
    with pytest.raises(DataError, match="2 of 3 conversations"):
        stage(write_corpus(tmp_path / "long", [9, 12, 0]), "drop")


def test_documents_without_a_mask_are_no_conversations(tmp_path: Path) -> None:
    data = stage(write_corpus(tmp_path / "text", LENGTHS, masked=False), "error")
    assert data.warnings(1) == []


@pytest.fixture
def recipe(tmp_path: Path, chat: str) -> Path:
    settings = {
        "extends": str(MODELS / "tiny.yaml"),
        "name": "r",
        "run_dir": str(tmp_path / "run"),
        "batch_tokens": 32,
        "attention": {"default": "full"},
        "data": {"train": [{"path": chat}], "packing": "best_fit"},
        "stages": [
            {"name": "long", "seq_len": 32, "tokens": 128},
            {"name": "short", "seq_len": 8, "tokens": 64},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "recipe.yaml"


def test_a_recipe_is_refused_with_its_key_before_anything_runs(recipe: Path, chat: str) -> None:
    with pytest.raises(ConfigError, match=f"data.train: {SAID.format(chat)}; set a larger seq_len, or data.long_conve"):
        resolve(load_config(recipe), check_files=True)
    resolve(load_config(recipe, ["stages.1.seq_len=32"]), check_files=True)


@pytest.mark.parametrize("command", ["plan", "blend"])
def test_plan_and_blend_say_how_many(recipe: Path, command: str) -> None:
    option = "data.long_conversations=truncate"
    words = ["plan", str(recipe), option, "--gpus", "1"] if command == "plan" else ["blend", str(recipe), option]
    done = run_app(app if command == "plan" else data_app, *words)
    assert "warning: stage short: 2 of 4 conversations of" in " ".join(done.output.split())
    assert "stage long: 2 of 4" not in " ".join(done.output.split())


def test_a_resumed_run_must_treat_them_in_the_same_way(recipe: Path) -> None:
    """Runs from before the option existed split them."""

    def plan_of(long: str) -> tuple[Any, dict[str, Any]]:
        run = resolve_unchecked(load_config(recipe, [f"data.long_conversations={long}"]))
        return run, data_plan(run.setup.shape, run.data, run.seed, run.stages[:1])

    run, saved = plan_of("split")
    assert "long_conversations" not in saved
    check_resumable(run, Progress(data_plan=saved), "there")
    with pytest.raises(CheckpointError, match=r"data\.long_conversations was"):
        check_resumable(plan_of("drop")[0], Progress(data_plan=saved), "there")
