"""Blending by document length: length buckets with weights of their own, and long documents read more often."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from moba_train.config.data import SourceConfig
from moba_train.config.load import load_config
from moba_train.data.samples import Sample, StageData
from moba_train.data.stream import DocumentPart
from moba_train.errors import ConfigError, DataError
from tests.data.corpora import MakeCorpus, numbered_documents
from tests.resolved import check


def stage(*sources: SourceConfig, sequences: int = 400) -> StageData:
    return StageData(sources, 4, sequences, 1, {}, 10_000)


def long_share(data: StageData, first_long: int) -> float:
    tokens = np.concatenate([data.sample(index).tokens for index in range(data.sequences)])
    return float((tokens >= first_long).mean())


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> str:
    """120 documents of 2 tokens, then 4 of 40: tokens from 241 on belong to long documents, 40 % of all."""
    return make_corpus("a", numbered_documents([2] * 120 + [40] * 4))


def test_ranges_of_one_corpus_are_blended_by_their_own_weights(corpus: str) -> None:
    data = stage(
        SourceConfig(path=corpus, weight=1, below_length=10), SourceConfig(path=corpus, weight=3, min_length=10)
    )
    assert long_share(data, 241) == pytest.approx(0.75, abs=0.01)
    assert set(data.fingerprints) == {corpus}
    name = data.fingerprints[corpus].name
    assert data.starts_after(400) == {f"{name}[0:10]": 400, f"{name}[10:]": 1200}
    longest_first = stage(
        SourceConfig(path=corpus, weight=3, min_length=10), SourceConfig(path=corpus, weight=1, below_length=10)
    )
    assert longest_first.starts_after(400) == data.starts_after(400)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_long_documents_are_read_factor_times_as_often(corpus: str, factor: float) -> None:
    data = stage(SourceConfig(path=corpus, upsample={"min_length": 10, "factor": factor}))
    assert long_share(data, 241) == pytest.approx(factor * 160 / (factor * 160 + 240), abs=0.01)
    reads = Counter(int(token) for index in range(400) for token in data.sample(index).tokens)
    long, short = np.mean([reads[i] for i in range(241, 401)]), np.mean([reads[i] for i in range(1, 241)])
    assert long / short == pytest.approx(factor, rel=0.05)


def test_several_ranges_of_lengths_get_their_factors_and_sources_keep_their_shares(make_corpus: MakeCorpus) -> None:
    """As in Fu et al. 2024 (arXiv:2402.10171), long documents count more within each source."""
    lengths = [2] * 120 + [8] * 30 + [40] * 6
    sources = [
        SourceConfig(
            path=make_corpus(name, numbered_documents(lengths)),
            weight=weight,
            upsample=[{"min_length": 5, "factor": 2}, {"min_length": 33, "factor": 6}],
        )
        for name, weight in (("a", 3), ("b", 1))
    ]
    data = stage(*sources, sequences=1000)
    parts = parts_by_range([data.sample(index) for index in range(1000)], lengths)
    read = {key: sum(part.stop - part.start for part in found) for key, found in parts.items()}
    for name, share in (("a", 0.75), ("b", 0.25)):
        for length, factor in ((2, 1), (8, 2), (40, 6)):
            expected = 4000 * share * factor / 9  # of each length 240 tokens
            assert read[name, length] == pytest.approx(expected, abs=4 * len(data.buckets))
    counted = data.tokens_by_length()
    assert counted.keys() == {"2", "8", "64"}
    for bound, length in (("2", 2), ("8", 8), ("64", 40)):
        assert counted[bound] == read["a", length] + read["b", length]
    # A later stage goes on in each range where the one before stopped.
    first = stage(*sources, sequences=500)
    later = StageData(sources, 4, 500, 1, first.starts_after(500), 10_000)
    both = parts_by_range([each.sample(index) for each in (first, later) for index in range(500)], lengths)
    assert all((Counter(found) - Counter(both[key])).total() <= 4 for key, found in parts.items())


def parts_by_range(samples: list[Sample], lengths: list[int]) -> dict[tuple[str, int], list[DocumentPart]]:
    """The parts of documents in the samples, by corpus and length of the document."""
    found: dict[tuple[str, int], list[DocumentPart]] = defaultdict(list)
    for part in (part for sample in samples for part in sample.parts):
        found[Path(part.source).name, lengths[part.document]].append(part)
    return found


def test_documents_named_twice_and_empty_ranges_are_refused(corpus: str) -> None:
    with pytest.raises(DataError, match=r"named twice in one blend; .*min_length"):
        stage(SourceConfig(path=corpus, below_length=11), SourceConfig(path=corpus, min_length=10))
    with pytest.raises(DataError, match=r"has no tokens in documents of at least 41 tokens"):
        stage(SourceConfig(path=corpus, min_length=41))
    with pytest.raises(DataError, match=r"has no tokens in documents of 3 to 39 tokens; .*`moba-data stats`"):
        stage(SourceConfig(path=corpus, min_length=3, below_length=40))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"min_length": 8, "below_length": 8}, r"data.train\[0\].below_length: given 8; allowed: above min_length 8"),
        (
            {"below_length": 8, "upsample": {"min_length": "1K", "factor": 2}},
            r"data.train\[0\].upsample.min_length: given 1024; allowed: above min_length 0 and below below_length 8",
        ),
        (
            {"upsample": [{"min_length": 64, "factor": 2}, {"min_length": 32, "factor": 4}]},
            r"data.train\[0\].upsample.min_length: given 64, 32; allowed: above min_length 0, each above the one",
        ),
    ],
)
def test_impossible_ranges_are_found_with_the_recipe(source: dict[str, object], message: str) -> None:
    recipe = load_config(Path(__file__).parents[2] / "configs/recipes/quickstart.yaml").model_dump()
    recipe["data"]["train"][0] |= source
    config = load_config(Path(__file__).parents[2] / "configs/recipes/quickstart.yaml")
    with pytest.raises(ConfigError, match=message):
        check(config.model_validate(recipe))
