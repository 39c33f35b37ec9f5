"""From conversations to a corpus with a loss mask: one conversation is one document."""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.conversations import TokenRecord, read_records
from data_tools.documents import BadRecord, choose_split, splits
from moba_train.data.chat_template import Template, TemplateSegment
from moba_train.data.indexed import IndexedDataset, IndexedDatasetWriter, dtype_for
from moba_train.data.loss_mask import mask_prefix
from moba_train.data.tokenizer import TextTokenizer, Tokenizer, load_text_tokenizer, tokenizer_file, tokenizer_hash
from moba_train.errors import DataError


class TokenizedConversation(NamedTuple):
    """Token ids and loss mask of a conversation."""

    ids: npt.NDArray[np.int64]
    """int64 [T]"""
    mask: npt.NDArray[np.uint8]
    """uint8 [T]: 1 where a token carries loss."""


@dataclass(frozen=True)
class SftResult:
    """Result of `make_sft_corpus`."""

    corpora: dict[str, IndexedDataset]
    """Corpora that were written, by prefix."""
    loss_tokens: dict[str, int]
    """Tokens with loss in each corpus, by prefix."""
    bad: list[str]
    """Skipped records, as "file:line: reason"."""


def encode_record(record: TokenRecord | list[TemplateSegment], tokenizer: TextTokenizer) -> TokenizedConversation:
    """Token ids and loss mask of one record, given as tokens or as the segments of a chat template.

    Each segment with or without loss is tokenized separately, so that no token spans both. This matches inference,
    where the prompt is tokenized before there is an answer. Raises ValueError when the record cannot be used.
    """
    if isinstance(record, TokenRecord):
        if max(record.input_ids) >= tokenizer.vocab_size:
            raise ValueError(f"token id {max(record.input_ids)}, but the tokenizer has {tokenizer.vocab_size}")
        ids = np.array(record.input_ids, dtype=np.int64)
        return TokenizedConversation(ids, np.array(record.loss_mask, dtype=np.uint8))
    ids_by_segment = []
    masks = []
    for segment in record:
        segment_ids = _encode(tokenizer, segment.text)
        ids_by_segment.append(segment_ids)
        masks.append(np.full(len(segment_ids), segment.in_loss, dtype=np.uint8))
    ids = np.array(list(itertools.chain(*ids_by_segment)), dtype=np.int64)
    return TokenizedConversation(ids, np.concatenate(masks))


def make_sft_corpus(
    files: Sequence[str],
    output: str,
    tokenizer_path: str,
    template: Template,
    holdout: float = 0.0,
    fail_on_error: bool = False,
) -> SftResult:
    """Write the conversations of `files` as the corpus `output` with its loss mask. An existing corpus is replaced.

    tokenizer_path  a sentencepiece model, a tokenizer.json, or a folder with one
    holdout         if not 0, the corpora are `output`-train and `output`-valid, and this fraction of the conversations,
                    selected by content, goes to the second

    Raises DataError when a file or the tokenizer cannot be read, no record can be used, or a record cannot be used and
    `fail_on_error` is set.
    """
    tokenizer = load_text_tokenizer(tokenizer_path)
    file = tokenizer_file(tokenizer_path)
    prefixes = [f"{output}{split}" for split in splits(holdout)]
    info = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": file.name,
        "tokenizer_sha256": tokenizer_hash(tokenizer_path),
        "loss_mask": True,
    }
    bad: list[str] = []
    loss_tokens = dict.fromkeys(prefixes, 0)
    with contextlib.ExitStack() as stack:
        # The masks are entered last and thus published first, so there is never a corpus without its mask.
        corpora = [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype_for(tokenizer.vocab_size), info))
            for prefix in prefixes
        ]
        masks = [
            stack.enter_context(IndexedDatasetWriter(mask_prefix(prefix), np.uint8, {"vocab_size": 2}))
            for prefix in prefixes
        ]
        for found in _encode_files(files, tokenizer, template):
            if isinstance(found, BadRecord):
                if fail_on_error:
                    raise DataError(f"{found}; correct the record, or skip such records with --on-error skip")
                bad.append(str(found))
                continue
            split = choose_split(found.ids.tobytes(), holdout)
            corpora[split].add_document(found.ids)
            masks[split].add_document(found.mask)
            loss_tokens[prefixes[split]] += int(found.mask[1:].sum())
        if not any(writer.documents for writer in corpora):
            reason = f": {bad[0]}" if bad else ": there is none"
            raise DataError(f"no conversation in {', '.join(files)} can be used{reason}")
    return SftResult({prefix: IndexedDataset(prefix) for prefix in prefixes}, loss_tokens, bad)


def _encode_files(
    files: Sequence[str], tokenizer: TextTokenizer, template: Template
) -> Iterator[TokenizedConversation | BadRecord]:
    # The second iterator runs ahead, so that a template in a process of its own works while this one tokenizes.
    records, ahead = itertools.tee((file, *numbered) for file in files for numbered in read_records(file))
    rendered = template.all_segments(record for _, _, record in ahead if isinstance(record, list))
    for file, number, record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        found = next(rendered) if isinstance(record, list) else record
        try:
            if isinstance(found, ValueError):
                raise found
            yield encode_record(found, tokenizer)
        except ValueError as error:
            yield BadRecord(file, number, str(error))


def show_documents(prefix: str, tokenizer: TextTokenizer, count: int, begin: str, end: str) -> Iterator[str]:
    """Yield the first `count` conversations, decoded from the corpus; `begin` and `end` enclose text with loss."""
    corpus = IndexedDataset(prefix)
    masks = IndexedDataset(mask_prefix(prefix))
    for document in range(min(count, corpus.documents)):
        ids = corpus.document(document).tolist()
        mask = masks.document(document)
        text = ""
        for in_loss, places in itertools.groupby(range(len(ids)), key=lambda place: bool(mask[place])):
            decoded = _decode(tokenizer, [ids[place] for place in places])
            text += f"{begin}{decoded}{end}" if in_loss else decoded
        yield text


def _encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of `text`; special tokens that are spelt out in it become these tokens."""
    special = _control_tokens(tokenizer) if isinstance(tokenizer, Tokenizer) else {}
    if not special:
        return tokenizer.encode(text)
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        ids += [special[part]] if part in special else tokenizer.encode(part)
    return ids


def _decode(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    """Text of `ids`, with control tokens spelt out."""
    special = _control_tokens(tokenizer) if isinstance(tokenizer, Tokenizer) else {}
    names = {token: name for name, token in special.items()}
    text = ""
    for control, group in itertools.groupby(ids, key=lambda token: token in names):
        found = list(group)
        text += "".join(names[token] for token in found) if control else tokenizer.decode(found)
    return text


@functools.cache
def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the control tokens, such as </s>, by name. Sentencepiece never makes them from text."""
    processor = tokenizer.processor
    tokens = [token for token in range(processor.vocab_size()) if processor.is_control(token)]
    return {processor.id_to_piece(token): token for token in tokens}
