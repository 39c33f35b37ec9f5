"""Memory and time of writing, opening, sampling, packing and verifying a corpus of many documents.

python -m benchmarks.index_memory [--documents N] [--output JSON]

Each step runs in a process of its own. Its peak memory is that of the process (VmHWM), which includes Python and the
libraries. The documents are short (8 tokens on average), because memory depends on their number.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import save
from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.show import verify_corpus
from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import StageData

PARTS = 10
SEQ_LEN = 8192
SAMPLES = 1000


def write_part(prefix: str, documents: int) -> dict[str, Any]:
    """Write one part, document by document, as a tokenizing process does."""
    lengths = np.random.default_rng(0).integers(1, 16, documents)
    tokens = np.arange(16, dtype=np.uint16)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add_document(tokens[:length])
    return {}


def merge(prefix: str, documents: int) -> dict[str, Any]:
    """Merge the parts into the corpus, which is the last step of `moba-data tokenize`."""
    with IndexedDatasetWriter(f"{prefix}-all", np.uint16, {"vocab_size": 16}) as writer:
        for _ in range(PARTS):
            writer.merge(prefix)
    assert writer.documents == documents
    return {}


def open_corpus(prefix: str, documents: int) -> dict[str, Any]:
    """Open the corpus, which checks every table."""
    corpus = IndexedDataset(f"{prefix}-all")
    assert corpus.documents == documents
    return {"tokens": corpus.tokens, "idx_bytes": Path(f"{prefix}-all.idx").stat().st_size}


def sample(prefix: str, documents: int, packing: Any = "concat", **source: Any) -> dict[str, Any]:
    """Read samples in order from the middle of the first epoch, as a resumed run does."""
    sources = [SourceConfig(path=f"{prefix}-all", **source)]
    sequences = 8 * documents // SEQ_LEN
    data = StageData(sources, SEQ_LEN, sequences, 0, {}, 16, packing)
    begin = time.perf_counter()
    data.sample(sequences // 2)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for index in range(sequences // 2 + 1, sequences // 2 + 1 + SAMPLES):
        data.sample(index)
    tokens = SAMPLES * SEQ_LEN / (time.perf_counter() - begin)
    return {"first_sample_s": first, "tokens_per_s": tokens, "padding_fraction": data.padding_fraction(0)}


def sample_packed(prefix: str, documents: int) -> dict[str, Any]:
    """Read samples with best-fit packing: the first one waits until all before it are packed."""
    return sample(prefix, documents, "best_fit")


def sample_range(prefix: str, documents: int) -> dict[str, Any]:
    """Read samples from two length buckets, the longer documents twice as often."""
    return sample(prefix, documents, upsample={"min_length": 8, "factor": 2.0})


def verify(prefix: str, _documents: int) -> dict[str, Any]:
    """Verify every byte of the corpus."""
    verify_corpus(f"{prefix}-all", None)
    return {}


def _measured(step: Callable[[str, int], dict[str, Any]], prefix: str, documents: int, results: Any) -> None:
    begin = time.perf_counter()
    processor = time.process_time()
    found = step(prefix, documents)
    times = {"seconds": time.perf_counter() - begin, "processor_s": time.process_time() - processor}
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    results.put({"peak_gib": peak / 2**20, **times, **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/index-memory.json"))
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in (write_part, merge, open_corpus, sample, sample_packed, sample_range, verify):
            queue = context.Queue()
            documents = args.documents // PARTS if step is write_part else args.documents
            process = context.Process(target=_measured, args=(step, f"{folder}/corpus", documents, queue))
            process.start()
            results[step.__name__] = queue.get()
            process.join()
            print(step.__name__, json.dumps(results[step.__name__]), flush=True)
    save(args.output, {"documents": args.documents, "parts": PARTS, "seq_len": SEQ_LEN}, results)


if __name__ == "__main__":
    main()
