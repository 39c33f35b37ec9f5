"""Training a sentencepiece BPE tokenizer that loses nothing: bytes stand in for unknown characters, spaces are kept."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from data_tools.documents import BadRecord, cut_shards, hash_fraction, read_documents, shard_bytes
from data_tools.progress import ByteProgress
from moba_train.errors import DataError

SAMPLE_BYTES = 128 << 20
"""More text than this is sampled down to it: the trainer holds all of it in memory, and gains nothing from more."""


def train_tokenizer(files: Sequence[str], output: str | Path, vocab_size: int, text_key: str) -> list[BadRecord]:
    """Write a model with `vocab_size` ids to `output` and return the records that could not be read.

    Ids 0 to 3 are unknown, begin, end and padding, then come the 256 bytes. The same files give the same model. Raises
    DataError when the text is too short, or too rich in characters, for `vocab_size`.
    """
    shards = cut_shards(files)
    total = sum(map(shard_bytes, shards))
    fraction = SAMPLE_BYTES / max(total, 1)
    bad: list[BadRecord] = []
    failures: list[DataError] = []

    def lines() -> Iterator[str]:
        try:
            with ByteProgress("train-tokenizer: reading", total) as progress:
                for shard in shards:
                    for document in read_documents(shard, text_key):
                        if isinstance(document, BadRecord):
                            bad.append(document)
                        elif hash_fraction(document, "tokenizer") < fraction:
                            yield from document.decode().split("\n")
                    progress.advance(shard_bytes(shard))
        except DataError as error:
            # Sentencepiece turns an exception of the iterator into its own, without the message.
            failures.append(error)

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            # Decoding gives back the text, and indentation becomes few tokens.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except RuntimeError as error:
        if not failures:
            raise _in_plain_words(error, vocab_size) from error
    if failures:
        raise failures[0]
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{output}.tmp")
    temporary.write_bytes(model.getvalue())
    temporary.replace(output)
    return bad


def _in_plain_words(error: RuntimeError, vocab_size: int) -> Exception:
    """Sentencepiece's complaint as a DataError; an unknown one stays as it is."""
    text = str(error)
    if most := re.search(r"Vocabulary size too high.*<= (\d+)", text):
        return DataError(f"--vocab-size {vocab_size} is too large for this text; give at most {most[1]}, or more text")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return DataError(f"--vocab-size {vocab_size} is too small for the characters; give at least {least[1]}")
    if "sentences_.empty()" in text:
        return DataError("there is no text to train on: all --input files are empty or unreadable")
    return error
