"""Training a lossless sentencepiece BPE tokenizer: unknown characters fall back to bytes, spaces are kept."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from data_tools.documents import (
    OTHER_SIZE_ON_DISK,
    BadRecord,
    EncodingErrors,
    Shard,
    cut_shards,
    read_documents,
    shard_bytes,
)
from data_tools.outputs import check_output_file, hash_fraction, replace_file
from data_tools.progress import ByteProgress
from moba_train.errors import DataError, UserError

SAMPLE_BYTES = 128 << 20
"""Larger inputs are sampled down to this size: the trainer keeps all text in memory, and more text gains nothing."""


def train_tokenizer(
    files: Sequence[str],
    output: str | Path,
    vocab_size: int,
    text_key: str,
    encoding_errors: EncodingErrors = "strict",
) -> list[BadRecord]:
    """Write a model with `vocab_size` ids to `output` and return the records that could not be read.

    Ids 0 to 3 are unknown, begin, end and padding; the 256 bytes follow. The same files give the same model. Raises
    DataError when the text is too short, or has too many different characters, for `vocab_size`,
    or `output` cannot be written or is another model.
    """
    check_output_file(output)
    shards = cut_shards(files)
    total = sum(map(shard_bytes, shards))
    fraction = SAMPLE_BYTES / max(_text_bytes(shards, text_key, encoding_errors), 1)
    bad: list[BadRecord] = []
    failures: list[UserError] = []

    def lines() -> Iterator[str]:
        try:
            with ByteProgress("train-tokenizer: reading", total) as progress:
                for shard in shards:
                    for document in read_documents(shard, text_key, encoding_errors=encoding_errors):
                        if isinstance(document, BadRecord):
                            bad.append(document)
                        elif hash_fraction(document, "tokenizer") < fraction:
                            yield from document.decode().split("\n")
                    progress.advance(shard_bytes(shard))
        except UserError as error:
            # Sentencepiece replaces an exception of the iterator by its own, without the message.
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
            # Decoding restores the text exactly, and indentation takes few tokens.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except RuntimeError as error:
        if not failures:
            raise _explain(error, vocab_size) from error
    if failures:
        raise failures[0]
    if Path(output).exists() and Path(output).read_bytes() != model.getvalue():
        raise DataError(
            f"{output} exists and was trained on other text or with another --vocab-size; corpora may be made with "
            "it. Delete it, or choose another --output"
        )
    replace_file(output, model.getvalue())
    return bad


def _text_bytes(shards: Sequence[Shard], text_key: str, encoding_errors: EncodingErrors) -> int:
    """Bytes of the text in `shards`: those with files of another size on the disk are read for it, of the others the
    size counts."""
    unknown = [shard for shard in shards if any(chunk.path.endswith(OTHER_SIZE_ON_DISK) for chunk in shard)]
    total = sum(map(shard_bytes, unknown))
    found = sum(map(shard_bytes, shards)) - total
    if not unknown:
        return found
    with ByteProgress("train-tokenizer: measuring", total) as progress:
        for shard in unknown:
            for document in read_documents(shard, text_key, encoding_errors=encoding_errors):
                found += 0 if isinstance(document, BadRecord) else len(document)
            progress.advance(shard_bytes(shard))
    return found


def _explain(error: RuntimeError, vocab_size: int) -> Exception:
    """A known sentencepiece error as a DataError with a remedy; any other error unchanged."""
    text = str(error)
    if most := re.search(r"Vocabulary size too high.*<= (\d+)", text):
        return DataError(f"--vocab-size {vocab_size} is too large for this text; give at most {most[1]}, or more text")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return DataError(
            f"--vocab-size {vocab_size} is too small for the characters of this text; give at least {least[1]}"
        )
    if "sentences_.empty()" in text:
        return DataError("there is no text to train on: every --input file is empty or cannot be read")
    return error
