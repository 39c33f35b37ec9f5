"""The corpus of F13 and F15 in SmolLM2's tokens: the documents of `moba-data corpus` encoded again, and another domain.

    bash launch/smollm2.sh prepare
    python -m experiments.smollm2_corpus --corpus data/long-60m --model runs/smollm2/hf \\
        --other runs/smollm2/data/train --output data/smollm2-long

The folder that it writes is what `python -m experiments equal-time --corpus` reads: `train`, `valid`, `other`,
`tokenizer.json` and the folder `weights`.
"""

import argparse
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from experiments.smollm2 import OTHER, WEIGHTS
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.tools.text_tokenizer import TextTokenizer, load_text_tokenizer

TOGETHER = 64
"""Documents that are encoded at once, in threads: 8 MB to 128 MB of text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that `moba-data corpus` wrote")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M in Hugging Face's format")
    parser.add_argument("--other", type=Path, required=True, help="prefix of a corpus in SmolLM2's tokens")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    written = load_text_tokenizer(given.corpus / "tokenizer.model")
    for name in ("train", "valid"):
        encode_again(IndexedDataset(given.corpus / name), written, given.model, given.output / name)
    for suffix in ("bin", "idx", "json"):
        if corpus_file(given.other, suffix).is_file():
            shutil.copy(corpus_file(given.other, suffix), corpus_file(given.output / OTHER, suffix))
    shutil.copy(given.model / "tokenizer.json", given.output)
    shutil.copytree(given.model, given.output / WEIGHTS, dirs_exist_ok=True)


def encode_again(source: IndexedDataset, written: TextTokenizer, model: Path, prefix: Path) -> None:
    """Write the documents of `source`, which `written` has encoded, to `prefix` with the tokenizer of `model`.

    Each ends with the token that ends a document.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    end = load_text_tokenizer(model).eos_id
    ends = [] if end is None else [end]
    with IndexedDatasetWriter(prefix, dtype_for(size), {"vocab_size": size}) as writer:
        texts = _texts(source, written)
        while some := list(itertools.islice(texts, TOGETHER)):
            for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
                writer.add_document(np.array([*encoding.ids, *ends], dtype_for(size)))
        print(f"{prefix}: {writer.documents} documents, {writer.tokens:,} tokens", flush=True)


def _texts(source: IndexedDataset, written: TextTokenizer) -> Iterator[str]:
    """The text of each document, without the token that ends it."""
    for number in range(source.documents):
        tokens = source.document(number, 0, int(source.document_lengths[number])).tolist()
        yield written.decode(tokens[:-1] if tokens[-1:] == [written.eos_id] else tokens)


if __name__ == "__main__":
    main()
