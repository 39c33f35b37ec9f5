"""A tokenizer whose ids are bytes, for the quick corpus: evaluations that ask questions need one."""

import json
from pathlib import Path
from typing import Any


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer.json without merges: token id b is the byte b."""
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {_letter(byte): byte for byte in range(256)}, "merges": []},
    }
    path.write_text(json.dumps(content))


def _letter(byte: int) -> str:
    """How byte-level tokenizers spell a byte: printable ones of Latin-1 as themselves, the others, in order, by the
    letters from U+0100 on."""
    if _is_printable(byte):
        return chr(byte)
    return chr(256 + sum(not _is_printable(other) for other in range(byte)))


def _is_printable(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
