"""Conversations from JSON records in the common data set formats, distinguished by their keys.

messages            {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...], "chat_template_kwargs": {}}
prompt, completion  {"prompt": "...", "completion": "..."}, or each a list of messages
ShareGPT            {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
alpaca              {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["", ""]]}
raw                 {"input_ids": [...], "loss_mask": [...]}: token ids, and 1 for each token that carries loss

All keys of a message reach the chat template, except those whose value is null, which data sets with columns write for
keys that a message does not have.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.dataset_folders import COLUMNS
from data_tools.documents import DOCUMENT_BYTES, BadRecord, json_type, read_lines
from moba_train.config.explain import did_you_mean
from moba_train.errors import DataError
from moba_train.foreign_files import open_foreign, parse_json, read_foreign
from moba_train.tools.chat.template import Conversation, Message

LIST_BYTES = 1 << 30
"""Largest .json file, which is read as a whole."""
NESTING = 64
"""Most levels of objects and lists in tools, tool calls and other keys of messages."""
ROLES = ("system", "developer", "user", "assistant", "tool")

_KEYS_BY_FORMAT = {
    "messages": (),
    "prompt": ("completion",),
    "completion": ("prompt",),
    "conversations": ("system",),
    "instruction": ("input", "output", "system", "history"),
}
"""Keys of a record that are read in each format, in addition to the key that identifies it."""
_KEYS_OF_ALL = ("tools", "chat_template_kwargs")
_RESERVED = ("messages", "tools", "add_generation_prompt")
"""Names that a template gets in another way than by `chat_template_kwargs`."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class TokenRecord:
    """A record that is already tokenized."""

    input_ids: list[int]
    loss_mask: list[int]


Record = Conversation | TokenRecord


def read_records(path: str) -> Iterator[tuple[int, Record | BadRecord]]:
    """Yield the records of a .jsonl file, of a .json file that holds a list, or of a file with columns, in order, with
    unusable ones in place.

    Each comes with the number of its line or row, or its number in the list, counted from 1. Raises DataError when the
    file as a whole cannot be read.
    """
    try:
        if path.endswith(COLUMNS):
            from data_tools.columns import read_rows  # needs pyarrow

            for number, row in read_rows(path):
                yield number, row if isinstance(row, BadRecord) else _parse(path, number, row)
        elif path.endswith(".jsonl"):
            with open_foreign(Path(path), None) as file:
                for number, (line, length) in enumerate(read_lines(file, DOCUMENT_BYTES), 1):
                    if length > DOCUMENT_BYTES:
                        yield number, BadRecord(path, number, f"longer than {DOCUMENT_BYTES:,} bytes")
                    elif line.strip():
                        yield number, _parse(path, number, line)
        elif path.endswith(".json"):
            records = parse_json(read_foreign(Path(path), LIST_BYTES))
            if not isinstance(records, list):
                raise DataError(f"{path} holds {json_type(records)}, not a list of records; JSON lines end in .jsonl")
            for number, record in enumerate(records, 1):
                yield number, _parse(path, number, record)
        else:
            raise DataError(f"{path}: conversations are read from .jsonl, .json, .parquet and .arrow files")
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
        raise ValueError(f"a record must be an object, not {json_type(record)}")
    if "input_ids" in record:
        return _raw(record)
    form = next((key for key in _KEYS_BY_FORMAT if key in record), "")
    if form == "messages":
        messages = _messages(record, "messages")
    elif form in ("prompt", "completion"):
        messages = _prompt(record) + _side(record, "completion", "assistant")
    elif form == "conversations":
        messages = _system(record) + [_sharegpt_message(message) for message in _list(record, "conversations")]
    elif form == "instruction":
        messages = _alpaca(record)
    else:
        keys = ", ".join(map(repr, record))[:200] or "none"
        raise ValueError(f"no key messages, prompt, conversations, instruction or input_ids; found {keys}")
    read = (form, *_KEYS_BY_FORMAT[form], *_KEYS_OF_ALL)
    unread = tuple(key for key, value in record.items() if key not in read and value is not None)
    return Conversation(messages, _tools(record), _variables(record), unread)


def _raw(record: dict[str, Any]) -> TokenRecord:
    ids = _list(record, "input_ids")
    mask = _list(record, "loss_mask")
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids, but {len(mask)} entries in loss_mask")
    for key, values, allowed in (("input_ids", ids, "whole numbers >= 0"), ("loss_mask", mask, "0 or 1")):
        types = (int,) if key == "input_ids" else (int, bool)
        good = all(type(value) in types and value >= 0 and (key == "input_ids" or value <= 1) for value in values)
        if not good:
            raise ValueError(f"{key} must hold {allowed}")
    if not any(mask[1:]):
        raise ValueError("no token after the first carries loss")
    return TokenRecord(ids, [int(value) for value in mask])


def _prompt(record: dict[str, Any]) -> list[Message]:
    """Messages of a prompt; those of the assistant carry no loss."""
    messages = _side(record, "prompt", "user")
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _side(record: dict[str, Any], key: str, role: str) -> list[Message]:
    """Messages under `key`; a text stands for one message of `role`."""
    if isinstance(record.get(key), list):
        return _messages(record, key)
    return [_text_message(role, record.get(key), key)]


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


def _sharegpt_message(message: Any) -> Message:
    role = _role(message, "from", tuple(_SHAREGPT_ROLES))
    parsed = _text_message(_SHAREGPT_ROLES[role], _content(message, "value"), "value")
    return _weighted(message, parsed | _others(message, "from", "value", *parsed))


def _messages(record: dict[str, Any], key: str) -> list[Message]:
    return [_message(message) for message in _list(record, key)]


def _message(message: Any) -> Message:
    role = _role(message, "role", ROLES)
    content = _content(message, "content")
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise ValueError(f"tool_calls in a message of role {role!r}; only the assistant calls tools")
    parsed: Message = (
        {"role": role, "content": None} if calls and content is None else _text_message(role, content, "content")
    )
    if calls:
        parsed["tool_calls"] = [_tool_call(call) for call in _list(message, "tool_calls")]
    return _weighted(message, parsed | _others(message, "tool_calls", *parsed))


def _others(message: dict[str, Any], *known: str) -> Message:
    """Keys of a message that only a template knows, such as `reasoning_content`; those that hold null are left out."""
    others = {key: value for key, value in message.items() if key not in (*known, "weight") and value is not None}
    for key, value in others.items():
        _check_nesting(value, f"{key!r:.60} of a message")
    return others


def _weighted(message: dict[str, Any], parsed: Message) -> Message:
    """`parsed` with the `weight` of `message`."""
    weight = message.get("weight")
    if weight is None:
        return parsed
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise ValueError(f"weight {json.dumps(weight)[:60]}; allowed: 0 (no loss on this message) to 1")
    if weight and parsed["role"] != "assistant":
        said = f"weight {weight:g} on a message of role {parsed['role']!r}"
        raise ValueError(f"{said}; only the assistant's messages carry loss")
    return parsed | {"weight": weight} if weight != 1 else parsed


def _role(message: Any, key: str, known: tuple[str, ...]) -> str:
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {json_type(message)}")
    role = message.get(key)
    if not isinstance(role, str):
        raise ValueError(f"a message has no text under {key!r}")
    if role not in known:
        raise ValueError(f"{key} {role!r:.60} is unknown; allowed: {', '.join(known)}{did_you_mean(role, known)}")
    return role


def _content(message: dict[str, Any], key: str) -> Any:
    """Content of a message, with the texts of a list of parts joined."""
    content = message.get(key)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(_text_message("", part.get("text"), "text")["content"] for part in content)
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call as templates expect it: arguments as an object, which OpenAI's format has as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool call must be an object like {"function": {"name": "...", "arguments": {...}}}')
    name = function["name"]
    arguments = _decoded(function.get("arguments") or {}, f"the arguments of tool call {name!r:.60}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of tool call {name!r:.60} must be an object, not {json_type(arguments)}")
    _check_nesting(call, f"tool call {name!r:.60}")
    outside = {key: call[key] for key in ("id", "index") if key in call} if function is call else call
    inside = {key: value for key, value in function.items() if function is not call or key not in outside}
    return {"type": "function"} | outside | {"function": inside | {"arguments": arguments}}


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = _decoded(record.get("tools") or [], "the list of tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' must be a list of objects, each the JSON schema of a tool")
    return tools or None


def template_variables(text: str) -> dict[str, Any]:
    """Variables for a chat template from JSON text. Raises DataError when it is no object, or names a key that a
    template gets in another way."""
    try:
        return _variables({"chat_template_kwargs": text}) or {}
    except ValueError as error:
        raise DataError(f"--template-kwargs: given {text!r:.80}: {error}") from None


def _variables(record: dict[str, Any]) -> dict[str, Any] | None:
    variables = _decoded(record.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise ValueError(f"'chat_template_kwargs' must be an object, not {json_type(variables)}")
    if reserved := [key for key in _RESERVED if key in variables]:
        raise ValueError(f"'chat_template_kwargs' has {reserved[0]!r}, which a template gets from the record itself")
    return variables or None


def _decoded(value: Any, what: str) -> Any:
    """`value`, or the JSON value that it holds as text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from None
    _check_nesting(value, what)
    return value


def _check_nesting(value: Any, what: str) -> None:
    level = [value]
    for _ in range(NESTING):
        level = [item for parent in level for item in _items(parent)]
    if level:
        raise ValueError(f"{what} is nested more than {NESTING} levels deep")


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _text_message(role: str, content: Any, key: str) -> Message:
    if not isinstance(content, str):
        raise ValueError(f"{key!r} must be text, not {json_type(content)}")
    return {"role": role, "content": content}


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record.get(key), list):
        raise ValueError(f"{key!r} must be a list, not {json_type(record.get(key))}")
    return record[key]
