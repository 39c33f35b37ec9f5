"""How much of the context text needs: loss of full attention with the context cut at 512, 2K, 8K and 32K tokens.

    python -m benchmarks.long_range_signal --corpus data/long --run runs/signal --output benchmarks/results/...
    python -m benchmarks.pictures long-range-signal
    python -m benchmarks.long_range_signal --quick --output ...     on a CPU, in a minute, with text of its own

The corpus is a folder of `moba-data corpus`. The real trainer trains a model of 10M parameters with full attention, at
8K and then at 32K tokens; run again, it goes on where it stopped. `--model RUN` takes a trained model in its place.

The loss is measured on the same tokens for every context. A place is a token of a held-out document with at least 32K
tokens before it; its targets are the 128 tokens up to it. With context C the model reads the C tokens before the last
target and nothing else, at positions from 0, so a target is predicted from C - 127 to C tokens. Places are 4K tokens
apart. Standard errors treat the places of one document as one observation, and those of differences to the longest
context are paired.
"""

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from benchmarks.options import length, need_gpus
from benchmarks.plotting import BLUE, GREEN, name, powers_of_two
from benchmarks.record import markdown, save
from benchmarks.trainer_run import launch
from data_tools.build_corpus import CorpusOptions, build_corpus
from data_tools.corpus_manifest import TOKENIZER, read_manifest
from data_tools.corpus_sources import Source
from moba_train.config.base import format_count
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import Sample
from moba_train.data.stream import DocumentPart, permutation
from moba_train.evals.position_wise import position_wise_loss
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import joined_world
from moba_train.tools.evaluate import load_on_this_machine
from moba_train.tools.saved_recipe import read_checkpoint

MODEL = {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "kv_heads": 3}
STAGES: list[dict[str, Any]] = [
    {"name": "short", "seq_len": 8192, "tokens": 100_000_000, "micro_batch_size": 4},
    {"name": "long", "seq_len": 32768, "tokens": 40_000_000, "micro_batch_size": 1},
]
BATCH_TOKENS = 1 << 16
QUICK_MODEL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
QUICK_STAGES: list[dict[str, Any]] = [
    {"name": "short", "seq_len": 256, "tokens": 16384},
    {"name": "long", "seq_len": 512, "tokens": 16384},
]
QUICK = {"contexts": [64, 128, 256, 512], "targets": 32, "apart": 256, "places": 6}
_COLOURS = {"valid": BLUE, "recall-valid": GREEN}


@dataclass(frozen=True)
class Places:
    """Places in the documents of a corpus that have `context` tokens before them, the first `count` in the order of a
    hash of their number."""

    corpus: IndexedDataset
    ends: npt.NDArray[np.int64]
    """int64 [places, 2]: document, and the number of its tokens up to the last target's predecessor."""

    @staticmethod
    def from_corpus(corpus: IndexedDataset, context: int, apart: int, count: int) -> "Places":
        """Raises SystemExit when no document is long enough."""
        lengths = corpus.document_lengths
        ends = [
            (document, end)
            for document in np.flatnonzero(lengths > context).tolist()
            for end in range(context, int(lengths[document]), apart)
        ]
        if not ends:
            raise SystemExit(f"{corpus.prefix}: no document is longer than {context} tokens")
        chosen = [ends[index] for index in permutation(len(ends), (0, context))[:count]]
        return Places(corpus, np.array(chosen))


@dataclass(frozen=True)
class CutSamples:
    """One sample for each place: the last `seq_len` tokens before it."""

    places: Places
    seq_len: int

    def __len__(self) -> int:
        return len(self.places.ends)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a single document part."""
        document, end = self.places.ends[index].tolist()
        corpus = self.places.corpus
        start = end - self.seq_len
        tokens = corpus.document(document, start, end + 1).astype(np.int64)
        weight = np.ones(self.seq_len, np.float32)
        part = DocumentPart(corpus.prefix, document, start, end)
        return Sample(tokens[:-1], tokens[1:], weight, [self.seq_len], [part])


def recipe(corpus: Path, run: Path, quick: bool) -> dict[str, Any]:
    """The training run."""
    vocab_size = read_manifest(corpus)["tokenizer"]["vocab_size"]
    stages = QUICK_STAGES if quick else STAGES
    shape = QUICK_MODEL if quick else MODEL
    batch_tokens = 2048 if quick else BATCH_TOKENS
    return {
        "name": "long-range-signal",
        "run_dir": str(run),
        "model": shape | {"vocab_size": vocab_size, "rope": {"theta": 500_000}},
        "compile": not quick,
        "attention": {"default": "full"},
        "data": {
            "tokenizer": str(corpus / TOKENIZER),
            "train": [{"path": str(corpus / "train")}],
            "validation": [{"path": str(corpus / "valid")}],
        },
        "batch_tokens": batch_tokens,
        "stages": stages,
        "optim": {
            "lr": 1.2e-3,
            "schedule": {"kind": "cosine", "warmup_tokens": sum(stage["tokens"] for stage in stages) // 20},
        },
        "evaluation": {"every": 50 if quick else 1000, "sequences": 8 if quick else 32},
        "checkpoint": {"every": 50 if quick else 500},
        "telemetry": {"console": not quick, "report": False},
    }


def measure(
    model: Transformer, corpus: IndexedDataset, settings: argparse.Namespace, device: torch.device
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Loss of each place with each context, float64 [contexts, places], and the document of each place."""
    places = Places.from_corpus(corpus, max(settings.contexts), settings.apart, settings.places)
    losses = []
    for context in settings.contexts:
        samples = CutSamples(places, context)
        found = position_wise_loss(model, samples, settings.targets, DataShard(), device)
        losses.append(found.losses[:, -1])
        print(f"{Path(corpus.prefix).name}, context {format_count(context, 1024)}: {losses[-1].mean():.4f}", flush=True)
    return np.array(losses), places.ends[:, 0]


def clustered(values: npt.NDArray[np.float64], clusters: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Mean of `values` [n], and its standard error where those of one cluster are not independent; NaN for a single
    cluster (Liang and Zeger 1986, with the factor for few clusters)."""
    sums = np.bincount(np.unique(clusters, return_inverse=True)[1], weights=values - values.mean())
    count = len(sums)
    if count == 1:
        return float(values.mean()), float("nan")
    return float(values.mean()), float(np.sqrt((sums**2).sum() * count / (count - 1)) / len(values))


def summary(
    losses: npt.NDArray[np.float64], documents: npt.NDArray[np.int64], contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """For each context: loss, and how much higher it is than with the longest one, each with its standard error."""
    rows = []
    for context, own in zip(contexts, losses, strict=True):
        loss, error = clustered(own, documents)
        gap, gap_error = clustered(own - losses[-1], documents)
        numbers = {
            "longest": contexts[-1],
            "loss": loss,
            "loss_error": error,
            "above_longest": gap,
            "above_longest_error": gap_error,
        }
        rows.append({"context": context} | {key: None if np.isnan(value) else value for key, value in numbers.items()})
    return rows


def sources_of(manifest: Mapping[str, Any], corpus: str, documents: npt.NDArray[np.int64]) -> list[str]:
    """The source of each of `documents`."""
    sources = manifest["corpora"][corpus]["sources"]
    names = [name for name, about in sources.items() for _ in range(about["documents"])]
    return [names[document] for document in documents.tolist()]


def evaluate(folder: Path, model_run: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Results by corpus: all places, and those of each source."""
    manifest = read_manifest(folder)
    saved = read_checkpoint(model_run)
    results: dict[str, Any] = {"corpus": manifest["id"], "checkpoint": saved.path.name, "measured": {}}
    with joined_world() as world:
        model = load_on_this_machine(saved)
        for name in [name for name in manifest["corpora"] if name != "train"]:
            losses, documents = measure(model, IndexedDataset(folder / name), settings, world.device)
            sources = np.array(sources_of(manifest, name, documents))
            found = {"places": len(documents), "documents": len(set(documents.tolist()))}
            rows = {"all": summary(losses, documents, settings.contexts)}
            for source in sorted(set(sources)):
                own = sources == source
                rows[source] = summary(losses[:, own], documents[own], settings.contexts)
            results["measured"][name] = found | {"rows": rows}
    return results


def table(results: Mapping[str, Any]) -> str:
    """A line for each corpus and source, a column for each context: loss, and the gap to the longest context."""
    shown = [["corpus", "source"]]
    for corpus, found in results["measured"].items():
        for source, rows in found["rows"].items():
            shown[0] = ["corpus", "source", *(format_count(row["context"], 1024) for row in rows)]
            shown.append([corpus, source, *map(_cell, rows)])
    return markdown(shown)


def _cell(row: Mapping[str, Any]) -> str:
    if row["context"] == row["longest"]:
        return f"{row['loss']:.4f}"
    error = "" if row["above_longest_error"] is None else f" ± {row['above_longest_error']:.4f}"
    return f"{row['loss']:.4f} ({row['above_longest']:+.4f}{error})"


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw how much higher the loss is than with the longest context, with standard errors."""
    axes = figure.subplots()
    for corpus, found in content["results"]["measured"].items():
        rows = found["rows"]["all"]
        contexts = [row["context"] for row in rows]
        gaps = [row["above_longest"] for row in rows]
        errors = [row["above_longest_error"] or 0 for row in rows]
        colour = _COLOURS[corpus]
        axes.errorbar(contexts, gaps, errors, fmt="o-", capsize=2, color=colour)
        name(axes, corpus, (contexts[0], gaps[0]), colour, (-8, 0))
    powers_of_two(axes, contexts)
    axes.set_xlim(left=contexts[0] / 2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(f"loss above {format_count(contexts[-1], 1024)}, nats a token")


def quick_corpus(folder: Path) -> Path:
    """A corpus of the sources of this repository, made in `folder`."""
    source = Source("sources", Path(__file__).parents[1] / "moba_train", ("*.py",))
    options = CorpusOptions(512, 0.3, 1024, 8192, 0.1)
    build_corpus([source], folder, options, 1)
    return folder


def main(given: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of `moba-data corpus`")
    parser.add_argument("--run", type=Path, help="run folder of the training")
    parser.add_argument("--model", type=Path, help="evaluate this run or checkpoint and train nothing")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that train")
    parser.add_argument("--contexts", type=length, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--targets", type=int, default=128, help="tokens up to a place that are predicted")
    parser.add_argument("--apart", type=length, default=4096, help="tokens between two places of a document")
    parser.add_argument("--places", type=int, default=512, help="places of each corpus, at most")
    parser.add_argument("--quick", action="store_true", help=f"a tiny model on any device, with {QUICK}")
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args(given if given is None else list(given))
    if settings.quick:
        vars(settings).update(QUICK)
    else:
        need_gpus(parser, settings.gpus)
        if settings.corpus is None or (settings.run is None) == (settings.model is None):
            parser.error("--corpus is needed, and either --run or --model")
    if settings.contexts != sorted(settings.contexts) or any(found % settings.targets for found in settings.contexts):
        parser.error("--contexts: needed in ascending order, each a multiple of --targets")
    with tempfile.TemporaryDirectory() as temporary:
        corpus = settings.corpus or quick_corpus(Path(temporary) / "corpus")
        run = settings.model or settings.run or Path(temporary) / "run"
        if settings.model is None:
            recipe_file = Path(temporary) / "recipe.yaml"
            launch(recipe(corpus, run, settings.quick), recipe_file, settings.gpus, check=True)
        results = evaluate(corpus, run, settings)
    paths = ("output", "corpus", "run", "model")
    shown = {key: value for key, value in vars(settings).items() if key not in paths}
    training = {} if settings.model else {"model": QUICK_MODEL if settings.quick else MODEL}
    save(settings.output, shown | training, results)
    print(table(results))


if __name__ == "__main__":
    main()
