"""The sidecar of a corpus, `PREFIX.json`: how it was made, and what was written.

vocab_size, tokenizer, ...  how it was made, as the program that wrote it says
bos_id, eos_id              tokens at the beginning and the end of each document, null for none
end_of_turn_id              token at the end of each turn of a conversation, null if it is several
loss_mask                   true with masks, which conversations have
documents, tokens           how many there are
min_id, max_id              smallest and largest token id
bin_sha256, idx_sha256      SHA-256 of PREFIX.bin and PREFIX.idx, compared by `moba-data verify`
sampled_sha256              SHA-256 of sampled blocks of PREFIX.bin, compared whenever the corpus is opened
"""

import json
from pathlib import Path
from typing import Any

from moba_train.errors import DataError

_INFO_TYPES: tuple[tuple[set[str], type, str], ...] = (
    ({"vocab_size", "documents", "tokens", "min_id", "max_id"}, int, "a whole number"),
    ({"bin_sha256", "idx_sha256", "sampled_sha256"}, str, "a string"),
)


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """Contents of the sidecar PREFIX.json, or None if there is none."""
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
