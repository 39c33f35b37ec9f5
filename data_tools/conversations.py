"""Conversations from JSON records in the common data set formats, distinguished by their keys.

messages   {"messages": [{"role": "user", "content": "..."}, ...]}
ShareGPT   {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
alpaca     {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["...", "..."]]}
raw        {"input_ids": [...], "loss_mask": [...]}: token ids, and 1 for each token that carries loss
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.documents import DOCUMENT_BYTES, BadRecord, read_lines
from moba_train.data.chat_template import Message
from moba_train.errors import DataError
from moba_train.foreign_files import open_foreign, parse_json, read_foreign

LIST_BYTES = 1 << 30
"""Largest .json file, which is read as a whole."""

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class TokenRecord:
    """A record that is already tokenized."""

    input_ids: list[int]
    loss_mask: list[int]


Record = list[Message] | TokenRecord


def read_records(path: str) -> Iterator[tuple[int, Record | BadRecord]]:
    """Yield the records of a .jsonl file, or of a .json file that holds a list, in order, with unusable ones in place.

    Each comes with its line number, or its number in the list, counted from 1. Raises DataError when the file as a
    whole cannot be read.
    """
    try:
        if path.endswith(".jsonl"):
            with open_foreign(Path(path), None) as file:
                for number, (line, length) in enumerate(read_lines(file, DOCUMENT_BYTES), 1):
                    if length > DOCUMENT_BYTES:
                        yield number, BadRecord(path, number, f"longer than {DOCUMENT_BYTES:,} bytes")
                    elif line.strip():
                        yield number, _parse(path, number, line)
        elif path.endswith(".json"):
            records = parse_json(read_foreign(Path(path), LIST_BYTES))
            if not isinstance(records, list):
                raise DataError(f"{path} holds no list of records; give JSON lines as .jsonl")
            for number, record in enumerate(records, 1):
                yield number, _parse(path, number, record)
        else:
            raise DataError(f"{path}: conversations are read from .jsonl and .json files")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be used: {error}; JSON lines (.jsonl) have no limit on their number") from error


def _parse(path: str, number: int, record: Any) -> Record | BadRecord:
    try:
        return parse_record(parse_json(record) if isinstance(record, bytes) else record)
    except ValueError as error:
        return BadRecord(path, number, str(error))


def parse_record(record: Any) -> Record:
    """Messages or tokens of a record. Raises ValueError, with what is missing, when it has none of the formats."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, not {type(record).__name__}")
    if "input_ids" in record:
        return _raw(record)
    if "messages" in record:
        return [_message(message, "role", "content") for message in _list(record, "messages")]
    if "conversations" in record:
        messages = [_message(message, "from", "value") for message in _list(record, "conversations")]
        for message in messages:
            if message["role"] not in _SHAREGPT_ROLES:
                raise ValueError(f"from {message['role']!r}; allowed: {', '.join(_SHAREGPT_ROLES)}")
            message["role"] = _SHAREGPT_ROLES[message["role"]]
        return _system(record) + messages
    if "instruction" in record:
        return _alpaca(record)
    keys = ", ".join(map(repr, record))[:200] or "none"
    raise ValueError(f"no key messages, conversations, instruction or input_ids; found {keys}")


def _raw(record: dict[str, Any]) -> TokenRecord:
    ids = _list(record, "input_ids")
    mask = _list(record, "loss_mask")
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids, but {len(mask)} entries in loss_mask")
    for key, values, allowed in (("input_ids", ids, "whole numbers >= 0"), ("loss_mask", mask, "0 or 1")):
        good = all(isinstance(value, int) and value >= 0 and (key == "input_ids" or value <= 1) for value in values)
        if not good:
            raise ValueError(f"{key} must hold {allowed}")
    if not any(mask[1:]):
        raise ValueError("no token after the first carries loss")
    return TokenRecord(ids, [int(value) for value in mask])


def _alpaca(record: dict[str, Any]) -> list[Message]:
    messages = _system(record)
    for turn in record.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError("history must be a list of [question, answer] pairs")
        messages += [_text_message("user", turn[0], "history"), _text_message("assistant", turn[1], "history")]
    question = _text_message("user", record["instruction"], "instruction")
    if record.get("input"):
        question["content"] += "\n\n" + _text_message("user", record["input"], "input")["content"]
    return [*messages, question, _text_message("assistant", record.get("output"), "output")]


def _system(record: dict[str, Any]) -> list[Message]:
    return [_text_message("system", record["system"], "system")] if record.get("system") else []


def _message(message: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
        raise ValueError(f"a message has no text under {role_key!r}")
    content = message.get(content_key)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part.get("text", "") for part in content)
    return _text_message(message[role_key], content, content_key)


def _text_message(role: str, content: Any, key: str) -> Message:
    if not isinstance(content, str):
        raise ValueError(f"{key!r} of a message must be text, not {type(content).__name__}")
    return {"role": role, "content": content}


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record.get(key), list):
        raise ValueError(f"{key!r} is not a list")
    return record[key]
