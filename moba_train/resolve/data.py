"""Problems of the corpora and the tokenizer that a recipe names."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.data.blend import length_buckets
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import LossWeights
from moba_train.data.samples import LONG_REMEDY
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hashes, vocabulary_size
from moba_train.errors import DataError


def length_problems(data: DataConfig, stages: Sequence[StageConfig]) -> Iterator[str]:
    """Ranges of document lengths that hold nothing."""
    for key, source in recipe_sources(data, stages):
        low, high = source.min_length or 0, source.below_length or math.inf
        begins = [begin for begin, *_ in source.length_bins[1:]]
        if low >= high:
            yield f"{key}.below_length: given {high}; allowed: above min_length {low}"
        elif [low, *begins, high] != sorted({low, *begins, high}):
            allowed = f"above min_length {low}" + (f" and below below_length {high}" if source.below_length else "")
            allowed += ", each above the one before" if len(begins) > 1 else ""
            yield f"{key}.upsample.min_length: given {', '.join(map(str, begins))}; allowed: {allowed}"


def corpus_problems(config: RunConfig) -> Iterator[str]:
    """Corpora that are missing, damaged or do not fit, relative to the working directory, of all stages: a later
    stage's are found before the first one begins."""
    data, stages = config.data, config.stages
    opened: dict[str, IndexedDataset] = {}
    weights: dict[str, LossWeights] = {}
    for key, source in recipe_sources(data, stages):
        missing = [f"{source.path}{end}" for end in (".bin", ".idx") if not Path(f"{source.path}{end}").is_file()]
        if missing:
            yield f"{key}.path: given {source.path!r}; no file {' and '.join(missing)} (from {Path.cwd()})"
        elif source.path not in opened:
            try:
                corpus = IndexedDataset(source.path)
                if not corpus.tokens:
                    yield f"{key}.path: the corpus {source.path} has no tokens; give another one"
                    continue
                corpus.check_vocabulary(config.model.vocab_size)
                weights[source.path] = LossWeights(corpus, config.loss_norm)
                opened[source.path] = corpus
            except DataError as error:
                yield f"{key}.path: {error}"
    for key, sources in _blends(data, stages).items():
        used = key != "data.train" or not all(stage.train for stage in stages)
        if used and sources and all(source.path in opened for source in sources):
            try:
                buckets = length_buckets(sources, opened.__getitem__)
            except DataError as error:
                yield f"{key}: {error}"
                continue
            if not any(weights[bucket.path].carries_loss(bucket.min_length, bucket.below_length) for bucket in buckets):
                yield f"{key}: no token carries loss; make the loss masks of the corpora again, or name other corpora"
            lengths = [stage.seq_len for stage in stages if (stage.train or data.train) is sources]
            for path, low, below, *_ in buckets if lengths and data.long_conversations == "error" else ():
                if long := weights[path].long_conversations(low, below, min(lengths)):
                    yield f"{key}: {long}; {LONG_REMEDY}"


def vocabulary_problems(tokenizer: str | None, vocab_size: int) -> Iterator[str]:
    """A tokenizer that is missing, damaged or larger than the model's vocabulary."""
    if tokenizer is None:
        return
    if not Path(tokenizer).exists():
        yield f"data.tokenizer: no file {tokenizer} (from {Path.cwd()})"
        return
    try:
        known = vocabulary_size(tokenizer)
    except DataError as error:
        yield f"data.tokenizer: {error}"
        return
    if known > vocab_size:
        given = f"model.vocab_size: given {vocab_size}; data.tokenizer ({tokenizer})"
        yield f"{given} has {known} tokens, so at least {known}"


def tokenizer_problems(data: DataConfig, stages: Sequence[StageConfig]) -> Iterator[str]:
    """Corpora on disk that were made with another tokenizer than `data.tokenizer` or, without one, than the first
    corpus: the same token ids stand for other text there."""
    reference, digests = "", list[str]()
    tokenizer = data.tokenizer
    if tokenizer is not None and tokenizer_file(tokenizer).is_file():
        reference, digests = f"data.tokenizer is {tokenizer}", tokenizer_hashes(tokenizer)
    for key, path, name, digest in recorded_tokenizers(recipe_sources(data, stages)):
        if not digests:
            reference, digests = f"the corpus {path} with {name}", [digest]
        elif digest not in digests:
            yield tokenizer_mismatch(key, path, name, digest, (reference, digests[0]))


def tokenizer_mismatch(key: str, path: str, name: str, digest: str, reference: tuple[str, str]) -> str:
    """Problem of a corpus that the tokenizer `name` made, and not the `reference`, a name and a SHA-256."""
    return (
        f"{key}.path: the corpus {path} was made with the tokenizer {name} (SHA-256 {digest[:12]}...), but "
        f"{reference[0]} (SHA-256 {reference[1][:12]}...), so that the same token ids are other text; make "
        "the corpora with one tokenizer"
    )


def recorded_tokenizers(sources: Iterable[tuple[str, SourceConfig]]) -> Iterator[tuple[str, str, str, str]]:
    """Key, path, and the tokenizer's name and SHA-256 of each corpus whose sidecar records them.

    Megatron's corpora have no sidecar, and corpora that cannot be opened are reported elsewhere.
    """
    keys: dict[str, str] = {}
    for key, source in sources:
        keys.setdefault(source.path, key)
    for path, key in keys.items():
        with contextlib.suppress(DataError):
            info = (IndexedDataset(path).info or {}) if Path(f"{path}.idx").is_file() else {}
            if isinstance(digest := info.get("tokenizer_sha256"), str):
                yield key, path, str(info.get("tokenizer")), digest


def _blends(data: DataConfig, stages: Sequence[StageConfig]) -> dict[str, Sequence[SourceConfig]]:
    """Every list of sources of the recipe, by its key."""
    blends: dict[str, Sequence[SourceConfig]] = {"data.train": data.train, "data.validation": data.validation}
    return blends | {f"stages[{index}].train": stage.train or [] for index, stage in enumerate(stages)}


def recipe_sources(data: DataConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[str, SourceConfig]]:
    """Every source of the recipe, with its key."""
    for key, sources in _blends(data, stages).items():
        yield from ((f"{key}[{index}]", source) for index, source in enumerate(sources))
