"""The run's tokenizer as transformers loads it: lm-eval's tasks measure their samples with it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moba_train.config.schema import RunConfig
from moba_train.convert.hf_tokenizer import TOKENIZER_JSON, export_tokenizer
from moba_train.data.tokenizer import CHAT_TEMPLATES, GENERATION_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from moba_train.errors import DataError
from moba_train.foreign_files import parse_json

_CLASS = "PreTrainedTokenizerFast"
_UNLIMITED = 10**30
"""transformers' own sign for no limit: tasks measure texts before they shorten them."""
_FILES = (TOKENIZER_JSON, SPECIAL_TOKENS_MAP, *CHAT_TEMPLATES, GENERATION_CONFIG)


def open_hf_tokenizer(config: RunConfig, seq_len: int, folder: Path, roots: Sequence[Path]) -> Any:
    """Write the run's tokenizer into the empty folder `folder`, and load it from there.

    It makes the ids of training, and puts the same mark before a text as the documents of training had. lm-eval loads
    it with `trust_remote_code`, so no file of it names code. Raises DataError when it cannot be read from below
    `roots`, or has no form that transformers can load.
    """
    from transformers import PreTrainedTokenizerFast

    export = export_tokenizer(config, "llama", seq_len, roots)
    if TOKENIZER_JSON not in export.files:
        raise DataError(f"moba-train lm-eval cannot use the tokenizer: {'; '.join(export.warnings)}")
    for name in _FILES:
        if name in export.files:
            (folder / name).write_bytes(export.files[name])
    options = parse_json(export.files.get(TOKENIZER_CONFIG, b"{}"))
    options = {key: value for key, value in options.items() if key != "auto_map"}
    options |= {"tokenizer_class": _CLASS, "model_max_length": _UNLIMITED}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(options), encoding="utf-8")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the packages raise plain Exception
        raise DataError(f"transformers cannot load the tokenizer {config.data.tokenizer}: {error}") from error
