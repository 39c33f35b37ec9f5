"""The sidecar of a corpus, `PREFIX.json`, and the fingerprint that identifies a corpus' content in any place.

The sidecar has these keys:

vocab_size, tokenizer, ...  origin of the corpus, by the program that wrote it
bos_id, eos_id              tokens at the beginning and the end of each document, null for none
end_of_turn_id              token at the end of each turn of a conversation, null if it is several
chat_template               `source`, `end_of_turn` and `variables` of the template that wrote the conversations
loss_mask                   true with masks, which conversations have
documents, tokens           their numbers
min_id, max_id              smallest and largest token id
bin_sha256, idx_sha256      SHA-256 of PREFIX.bin and PREFIX.idx, compared by `moba-data verify`
sampled_sha256              SHA-256 of sampled blocks of PREFIX.bin, compared whenever the corpus is opened
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moba_train.errors import DataError

_INFO_TYPES: tuple[tuple[set[str], type, str], ...] = (
    ({"vocab_size", "documents", "tokens", "min_id", "max_id"}, int, "a whole number"),
    ({"bin_sha256", "idx_sha256", "sampled_sha256"}, str, "a string"),
    ({"chat_template"}, dict, "an object"),
)


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """Contents of the sidecar PREFIX.json, or None if there is none. Raises DataError for one that cannot be used."""
    if not path.exists():
        return None
    try:
        info = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); delete it or make the corpus again") from error
    if not isinstance(info, dict):
        raise DataError(f"{path} holds {type(info).__name__}, not an object; delete it or make the corpus again")
    for keys, kind, words in _INFO_TYPES:
        for key in keys & info.keys():
            if not isinstance(info[key], kind):
                raise DataError(f"{path}: {key} is {info[key]!r}, not {words}; delete it or make the corpus again")
    return info


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of one corpus and its loss mask, in hexadecimal. Checkpoints store them."""

    index: str
    """SHA-256 of PREFIX.idx and the size of PREFIX.bin: the lengths and order of the documents."""
    tokens: str
    """SHA-256 of sampled blocks of PREFIX.bin."""
    bin_sha256: str | None = None
    """SHA-256 of all of PREFIX.bin, if the sidecar has it."""
    mask: "Fingerprint | None" = None
    """Fingerprint of the loss mask, if there is one."""

    @property
    def name(self) -> str:
        """Name for the corpus' tokens, equal for every copy, with or without its sidecar and mask."""
        return hashlib.sha256(f"{self.index}{self.tokens}".encode()).hexdigest()[:32]

    def difference(self, saved: "Fingerprint") -> str | None:
        """Difference to a fingerprint that a checkpoint has, in words; None if there is none."""
        if self.index != saved.index:
            return "other document lengths"
        both_complete = self.bin_sha256 is not None and saved.bin_sha256 is not None
        if self.tokens != saved.tokens or (both_complete and self.bin_sha256 != saved.bin_sha256):
            return "other tokens in documents of the same lengths"
        if self.mask is None or saved.mask is None:
            return None if self.mask is saved.mask else "a loss mask was added or removed"
        return "another loss mask" if self.mask.difference(saved.mask) else None
