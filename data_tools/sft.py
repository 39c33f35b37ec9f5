"""From conversations to a corpus with a loss mask: a conversation is one document, or one for each turn if the chat
template drops the thoughts of earlier turns."""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.conversations import TokenRecord, read_records
from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from data_tools.documents import BadRecord
from data_tools.outputs import already_made, choose_split, corpus_prefixes, list_skipped, write_errors
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import byte_of_weight, mask_prefix
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hash
from moba_train.errors import DataError
from moba_train.tools.chat.load import Template
from moba_train.tools.chat.template import Conversation, SplitConversation, TemplateSegment, texts
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer

MARKER = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|<(?:start|end)_of_[a-z]+>|\[/?INST\]")
"""Marks that chat templates write around turns, in the notations of common models."""


WORK_VERSION = 2
"""Changes when the same records become other corpora; 1: keys of messages that only templates know were dropped."""


MOST_KEYS = 20
"""Unread keys that are named."""


class TokenizedConversation(NamedTuple):
    """Token ids and loss mask of a conversation."""

    ids: npt.NDArray[np.int64]
    """int64 [T]"""
    mask: npt.NDArray[np.uint8]
    """uint8 [T]: the weight of each token in the loss, as a byte of a mask."""
    answers_cut: int = 0
    """Answers that `--max-tokens` has cut off."""


class SftOptions(NamedTuple):
    """Choices of what is trained on, the same for all conversations."""

    max_tokens: int | None = None
    """Longest conversation (`encode_record`)."""
    loss_turns: Literal["all", "last"] = "all"
    """`last`: only answers after the last message of a user carry loss."""
    thought_weight: float = 1.0
    """Factor on the weight of thoughts (`template.THOUGHTS`); 0: they carry no loss."""
    variables: dict[str, Any] = {}
    """`chat_template_kwargs` of records that do not give them, such as `enable_thinking`."""

    def applied(self, conversation: Conversation) -> Conversation:
        """The conversation with these choices."""
        messages = conversation.messages
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if self.loss_turns == "last" and users:
            earlier = [m | {"weight": 0} if m["role"] == "assistant" else m for m in messages[: users[-1]]]
            messages = [*earlier, *messages[users[-1] :]]
        if self.thought_weight != 1:
            factor = {"thought_weight": self.thought_weight}
            messages = [m | factor if m["role"] == "assistant" else m for m in messages]
        variables = {**self.variables, **(conversation.variables or {})}
        return conversation._replace(messages=messages, variables=variables or None)


NO_OPTIONS = SftOptions()


@dataclass
class NotWhole:
    """Counts of parts of the conversations that are not in the corpus, or not as they were given."""

    unread: Counter[str] = field(default_factory=Counter)
    """Number of occurrences of each key that changes nothing in the text, as `SplitConversation.unread` names them."""
    cut: Counter[str] = field(default_factory=Counter)
    """`conversations` that were cut into one sample a turn, and the `samples` that they gave."""
    left_out: Counter[str] = field(default_factory=Counter)
    """`messages` after the last answer that carries loss, and the `conversations` that had them."""

    shortened: Counter[str] = field(default_factory=Counter)
    """`samples` that end before their last answer, and the `answers` that this left out."""

    def add(self, split: SplitConversation, answers_cut: int) -> None:
        """Count what one conversation became."""
        self.unread.update(split.unread)
        if len(split.samples) > 1:
            self.cut.update(conversations=1, samples=len(split.samples))
        if answers_cut:
            self.shortened.update(samples=1, answers=answers_cut)
        if split.left_out:
            self.left_out.update(conversations=1, messages=split.left_out)

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each kind of loss or change."""
        if self.unread:
            keys = ", ".join(f"{key!r:.80} ({count:,})" for key, count in self.unread.most_common(MOST_KEYS))
            more = len(self.unread) - MOST_KEYS
            keys += f" and {more:,} other keys" if more > 0 else ""
            yield (
                f"these keys change nothing in the text, because the format or the chat template does not read them: "
                f"{keys}; rename those that matter to what the template reads, or give another --template"
            )
        if self.cut:
            yield (
                f"{self.cut['conversations']:,} conversations were cut into {self.cut['samples']:,} samples, each up "
                "to an answer, because the chat template writes earlier answers in another way, such as without their "
                "thoughts"
            )
        if self.shortened:
            yield (
                f"{self.shortened['samples']:,} conversations are longer than --max-tokens and end with the last "
                f"answer within; {self.shortened['answers']:,} answers are left out"
            )
        if self.left_out:
            yield (
                f"{self.left_out['messages']:,} messages at the ends of {self.left_out['conversations']:,} "
                "conversations are left out, because no answer that carries loss follows them"
            )


@dataclass(frozen=True)
class SftResult:
    """Result of `make_sft_corpus`."""

    corpora: dict[str, IndexedDataset]
    """Corpora that were written, by prefix."""
    loss_tokens: dict[str, int]
    """Tokens with loss in each corpus, by prefix."""
    bad: list[str]
    """Skipped records, as "file:line: reason"."""
    split_markers: dict[str, int]
    """Number of tokens of each template marker that is not a single token."""
    not_whole: NotWhole
    already_complete: bool
    """True if identical corpora existed before, so that nothing was done."""


def encode_record(
    record: TokenRecord | list[TemplateSegment], tokenizer: ChatTokenizer, most: int | None = None
) -> TokenizedConversation:
    """Token ids and loss mask of one record, given as tokens or as the segments of a chat template.

    most: tokens of a conversation. A longer one ends with the last answer that fits, so that no answer is without its
        prompt or its end, and no prompt without its answer; None: no limit

    Each segment with or without loss is tokenized separately, so that no token spans both. This matches inference,
    in which the prompt is tokenized before there is an answer. Raises ValueError when the record cannot be used.
    """
    if isinstance(record, TokenRecord):
        if max(record.input_ids) >= tokenizer.vocab_size:
            raise ValueError(f"token id {max(record.input_ids)}, but the tokenizer has {tokenizer.vocab_size}")
        if most is not None and len(record.input_ids) > most:
            raise ValueError(f"{len(record.input_ids):,} tokens, --max-tokens allows {most:,}")
        ids = np.array(record.input_ids, dtype=np.int64)
        return TokenizedConversation(ids, np.array(record.loss_mask, dtype=np.uint8))
    ids_by_segment = []
    masks = []
    for segment in record:
        segment_ids = tokenizer.encode(segment.text)
        ids_by_segment.append(segment_ids)
        masks.append(np.full(len(segment_ids), byte_of_weight(segment.weight), dtype=np.uint8))
    ids = np.array(list(itertools.chain(*ids_by_segment)), dtype=np.int64)
    mask = np.concatenate(masks)
    ends = np.cumsum([len(segment_ids) for segment_ids in ids_by_segment])
    if most is None or ends[-1] <= most:
        return TokenizedConversation(ids, mask)
    answers = [int(end) for end, segment in zip(ends, record, strict=True) if segment.ends_answer]
    fitting = [end for end in answers if end <= most]
    if not fitting:
        raise ValueError(f"its first answer ends with token {answers[0]:,}, --max-tokens allows {most:,}")
    return TokenizedConversation(ids[: fitting[-1]], mask[: fitting[-1]], len(answers) - len(fitting))


def make_sft_corpus(
    files: Sequence[str],
    output: str,
    tokenizer_path: str,
    template: Template,
    holdout: float = 0.0,
    fail_on_error: bool = False,
    options: SftOptions = NO_OPTIONS,
) -> SftResult:
    """Write the conversations of `files` as the corpus `output` with its loss mask. If it exists, nothing is done.

    tokenizer_path: a sentencepiece model, a tokenizer.json, or a folder with one
    holdout: if not 0, the corpora are `output`-train and `output`-valid, and this fraction of the conversations,
        selected by content, goes to the second

    Raises DataError when a file or the tokenizer cannot be read, `output` cannot be written or is a corpus of other
    input, no record can be used, or a record cannot be used and `fail_on_error` is set.
    """
    prefixes = corpus_prefixes(output, holdout)
    tokenizer = ChatTokenizer(load_text_tokenizer(tokenizer_path))
    sha256 = tokenizer_hash(tokenizer_path)
    work = _work_fingerprint(files, sha256, template, holdout, fail_on_error, options)
    bad: list[str] = []
    markers = _Markers(template.definition.end_of_turn)
    not_whole = NotWhole()
    with write_errors(output):
        already_complete = already_made(dict.fromkeys(prefixes, work))
        if not already_complete:
            info = {
                "vocab_size": tokenizer.vocab_size,
                "tokenizer": tokenizer_file(tokenizer_path).name,
                "tokenizer_sha256": sha256,
                "end_of_turn_id": _single_token(tokenizer, template.definition.end_of_turn),
                "loss_mask": True,
                "work": work,
            }
            found = _encode_files(files, tokenizer, template, markers, not_whole, info, options)
            bad = _write(found, prefixes, holdout, info, fail_on_error)
            list_skipped(output, bad)
    return SftResult(
        {prefix: IndexedDataset(prefix) for prefix in prefixes},
        {prefix: _count_loss_tokens(prefix) for prefix in prefixes},
        bad,
        markers.split(tokenizer),
        not_whole,
        already_complete,
    )


def _write(
    found: Iterator[list[TokenizedConversation] | BadRecord],
    prefixes: Sequence[str],
    holdout: float,
    info: dict[str, Any],
    fail_on_error: bool,
) -> list[str]:
    """Write conversations into the corpora `prefixes`, and return the bad records."""
    bad: list[str] = []
    dtype = dtype_for(info["vocab_size"])
    with contextlib.ExitStack() as stack:
        # The masks are entered last and thus published first, so there is never a corpus without its mask.
        corpora = [stack.enter_context(IndexedDatasetWriter(prefix, dtype, info)) for prefix in prefixes]
        masks = [
            stack.enter_context(IndexedDatasetWriter(mask_prefix(prefix), np.uint8, {"vocab_size": 101}))
            for prefix in prefixes
        ]
        for samples in found:
            if isinstance(samples, BadRecord):
                if fail_on_error:
                    raise DataError(f"{samples}; correct the record, or skip such records with --on-error skip")
                bad.append(str(samples))
                continue
            # All samples of a conversation on one side: the last has the text of the others.
            split = choose_split(samples[-1].ids.tobytes(), holdout)
            for sample in samples:
                corpora[split].add_document(sample.ids)
                masks[split].add_document(sample.mask)
        if not any(writer.documents for writer in corpora):
            raise DataError(
                f"none of the {len(bad):,} records can be used: {bad[0]}" if bad else "the --input files have no record"
            )
    return bad


def _work_fingerprint(
    files: Sequence[str],
    tokenizer_sha256: str,
    template: Template,
    holdout: float,
    fail_on_error: bool,
    options: SftOptions,
) -> str:
    """SHA-256 of everything the corpus depends on; input files enter by size and modification time."""
    stats = [(file, os.stat(file)) for file in files]
    work = {
        "version": WORK_VERSION,
        "files": [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats],
        "tokenizer": tokenizer_sha256,
        "template": template.definition.fingerprint,
        "holdout": holdout,
        "fail_on_error": fail_on_error,
        **({"options": options} if options != NO_OPTIONS else {}),
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()


def _count_loss_tokens(prefix: str) -> int:
    """Tokens of a corpus that carry loss. The first token of a document has none: nothing precedes it."""
    mask = IndexedDataset(mask_prefix(prefix))
    return sum(int(np.count_nonzero(mask.document(document)[1:])) for document in range(mask.documents))


class _Markers:
    """The markers that a template has written so far, `end_of_turn` among them."""

    def __init__(self, end_of_turn: str) -> None:
        self._end_of_turn = end_of_turn
        self._found: set[str] = set()

    def add(self, conversation: Conversation, segments: Sequence[TemplateSegment]) -> None:
        """Record the markers in `segments`, except those that only the messages have."""
        self._found.add(self._end_of_turn)
        written = {marker for segment in segments for marker in MARKER.findall(segment.text)} - self._found
        if written:
            self._found |= written - {marker for text in texts(conversation) for marker in MARKER.findall(text)}

    def split(self, tokenizer: ChatTokenizer) -> dict[str, int]:
        """Number of tokens of each marker that is not a single token."""
        split = (marker for marker in sorted(self._found) if _single_token(tokenizer, marker) is None)
        return {marker: len(tokenizer.encode(marker)) for marker in split}


def _single_token(tokenizer: ChatTokenizer, marker: str) -> int | None:
    """Token id of `marker`, or None if it is several tokens."""
    # Twice, because some tokenizers put a space before every text.
    once, twice = tokenizer.encode(marker), tokenizer.encode(marker * 2)
    token = once[-1]
    return token if twice == [*once, token] and tokenizer.decode([token]) == marker else None


def _encode_files(
    files: Sequence[str],
    tokenizer: ChatTokenizer,
    template: Template,
    markers: _Markers,
    not_whole: NotWhole,
    info: dict[str, Any],
    options: SftOptions,
) -> Iterator[list[TokenizedConversation] | BadRecord]:
    """Yield the samples of each conversation, or the reason why it cannot be used. `info` gets the template, unless all
    records are tokens."""
    # The second iterator runs ahead, so that a template in another process works while this one tokenizes.
    records, ahead = itertools.tee((file, *numbered) for file in files for numbered in read_records(file))
    conversations = (record for _, _, record in ahead if isinstance(record, Conversation))
    rendered = template.split_all(map(options.applied, conversations))
    for file, number, record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        try:
            if isinstance(record, TokenRecord):
                yield [encode_record(record, tokenizer, options.max_tokens)]
                continue
            split = next(rendered)
            if isinstance(split, ValueError):
                raise split
            encoded = _encode_samples(split.samples, tokenizer, options.max_tokens)
        except ValueError as error:
            yield BadRecord(file, number, str(error))
            continue
        info["chat_template"] = template.definition._asdict()
        not_whole.add(split, sum(sample.answers_cut for sample in encoded))
        for sample in split.samples:
            markers.add(record, sample)
        yield encoded


def _encode_samples(
    samples: Sequence[list[TemplateSegment]], tokenizer: ChatTokenizer, most: int | None
) -> list[TokenizedConversation]:
    """Token ids and masks of the samples of a conversation, without those of which no answer fits into `most` tokens.
    Raises ValueError where none remains."""
    found: list[TokenizedConversation] = []
    error: ValueError | None = None
    missing = 0
    for sample in samples:
        try:
            found.append(encode_record(sample, tokenizer, most))
        except ValueError as problem:
            error = error or problem
            missing += sum(segment.ends_answer for segment in sample)
    if error is not None and not found:
        raise error
    if missing:
        found[-1] = found[-1]._replace(answers_cut=found[-1].answers_cut + missing)
    return found
