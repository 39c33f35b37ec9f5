"""Benefit and cost of best-fit packing on real documents: documents cut, padding, time.

python -m benchmarks.packing PREFIX... [--seq-len N ...] [--output JSON]

One epoch of each corpus is packed at each length, by the code that training runs.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import save
from moba_train.data.indexed import IndexedDataset
from moba_train.data.packers import BestFitPacker
from moba_train.data.stream import DocumentStream

SEQ_LENS = (2048, 8192, 32768, 131072)


def concatenation_cuts(stream: DocumentStream, seq_len: int) -> float:
    """Fraction of the documents no longer than a sample that concatenation cuts nevertheless, over one epoch."""
    lengths = stream.dataset.document_lengths[stream.documents_between(0, stream.tokens)]
    ends = np.cumsum(lengths)
    short = lengths <= seq_len
    return float(((ends - lengths) // seq_len != (ends - 1) // seq_len)[short].mean())


def measure(prefix: str, seq_len: int) -> dict[str, Any]:
    """Padding of one epoch packed by best fit, and the seconds it takes."""
    stream = DocumentStream(IndexedDataset(prefix), seed=0)
    packer = BestFitPacker(stream, 0, seq_len)
    begin = time.process_time()
    samples = -(-stream.tokens // seq_len)
    padding = packer.padding_fraction(samples)
    seconds = time.process_time() - begin
    return {
        "corpus": Path(prefix).name,
        "documents": stream.documents,
        "tokens": stream.tokens,
        "seq_len": seq_len,
        "longer_documents": float((stream.dataset.document_lengths > seq_len).mean()),
        "concat_cuts": concatenation_cuts(stream, seq_len),
        "best_fit_padding": padding,
        "microseconds_per_document": seconds / stream.documents * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prefixes", nargs="+")
    parser.add_argument("--seq-len", type=int, action="append")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/packing.json"))
    args = parser.parse_args()
    rows = [measure(prefix, seq_len) for prefix in args.prefixes for seq_len in args.seq_len or SEQ_LENS]
    for row in rows:
        print(
            f"{row['corpus']} {row['documents']:,} documents, seq_len {row['seq_len']:7,}: concat cuts "
            f"{row['concat_cuts']:.1%} of those that fit, best_fit none; padding {row['best_fit_padding']:.3%}; "
            f"{row['microseconds_per_document']:.2f} us a document"
        )
    save(args.output, {"prefixes": [Path(prefix).name for prefix in args.prefixes]}, rows)


if __name__ == "__main__":
    main()
