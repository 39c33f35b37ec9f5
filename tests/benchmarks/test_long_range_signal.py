"""Loss with the context cut: the same targets for every context, which see that context and nothing else."""

import argparse
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import long_range_signal, pictures
from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.layout import packed_layout
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import joined_world

SETTINGS = argparse.Namespace(contexts=[8, 16, 32], targets=4, apart=5, places=100)
VOCAB = 200


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents of 32, 33, 60 and 9 tokens: one, and six, of 32 tokens and one more."""
    prefix = tmp_path_factory.mktemp("signal") / "valid"
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in (32, 33, 60, 9):
            writer.add_document(draw.integers(VOCAB, size=length))
    return IndexedDataset(prefix)


def test_places_have_the_longest_context_before_them(corpus: IndexedDataset) -> None:
    places = long_range_signal.Places.from_corpus(corpus, 32, 5, 100)
    assert sorted(map(tuple, places.ends.tolist())) == [(1, 32), *((2, end) for end in range(32, 60, 5))]
    few = long_range_signal.Places.from_corpus(corpus, 32, 5, 3)
    assert few.ends.tolist() == places.ends[:3].tolist()
    with pytest.raises(SystemExit, match="no document is longer than 64 tokens"):
        long_range_signal.Places.from_corpus(corpus, 64, 5, 3)


def test_targets_are_the_same_and_see_no_more_than_the_context(corpus: IndexedDataset) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1}
    model = Transformer(ModelConfig.model_validate(shape))
    initialize_weights(model, 0)
    model.set_attention(build_attention(resolve_layers(AttentionConfig(), 2), 8))
    with joined_world() as world:
        losses, documents = long_range_signal.measure(model.to(world.device), corpus, SETTINGS, world.device)
        places = long_range_signal.Places.from_corpus(corpus, 32, 5, 100)
        assert documents.tolist() == places.ends[:, 0].tolist()
        for context, found in zip(SETTINGS.contexts, losses, strict=True):
            for place, (document, end) in enumerate(places.ends.tolist()):
                text = torch.from_numpy(corpus.document(document).astype(np.int64)).to(world.device)
                read = text[end - context : end]
                positions = torch.arange(context, device=world.device)
                logits = model(read, positions, packed_layout([context], world.device))[-4:].double()
                expected = F.cross_entropy(logits, text[end - 3 : end + 1]).item()
                assert found[place] == pytest.approx(expected, rel=1e-5)


def test_errors_take_a_document_as_one_observation() -> None:
    values = np.array([1.0, 1.0, 1.0, 5.0])
    mean, error = long_range_signal.clustered(values, np.array([7, 7, 7, 9]))
    assert (mean, error) == (2.0, pytest.approx((2 * (3.0**2 + 3.0**2)) ** 0.5 / 4))
    each, independent = long_range_signal.clustered(values, np.arange(4))
    assert (each, independent) == (2.0, pytest.approx(values.std(ddof=1) / 2))
    assert np.isnan(long_range_signal.clustered(values, np.zeros(4, np.int64))[1])


def test_the_table_and_the_plot_show_the_gap_to_the_longest_context(tmp_path: Path) -> None:
    losses = np.array([[2.0, 3.0], [1.75, 2.75], [1.5, 2.0]])
    rows = long_range_signal.summary(losses, np.array([0, 1]), [512, 2048, 8192])
    assert [row["above_longest"] for row in rows] == [0.75, 0.5, 0.0]
    measured = {"valid": {"places": 2, "documents": 2, "rows": {"all": rows}}}
    results: dict[str, Any] = {"corpus": "name", "checkpoint": "step", "measured": measured}
    head, _, line = long_range_signal.table(results).splitlines()
    assert head == "| corpus | source | 512 | 2K | 8K |"
    assert line.split(" | ")[2:] == ["2.5000 (+0.7500 ± 0.2500)", "2.2500 (+0.5000 ± 0.2500)", "1.7500 |"]
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"results": results}))
    pictures.draw("long-range-signal", [file], tmp_path / "plot.svg")
    assert "drawn from results with sha256" in (tmp_path / "plot.svg").read_text()


def test_documents_are_told_apart_by_source() -> None:
    sources = {"linux-source": {"documents": 2}, "rust": {"documents": 1}}
    manifest = {"corpora": {"valid": {"sources": sources}}}
    found = long_range_signal.sources_of(cast(Any, manifest), "valid", np.array([2, 0, 1]))
    assert found == ["rust", "linux-source", "linux-source"]
