"""The tokenizer of an export: files that transformers' `AutoTokenizer` loads, with the ids of the run's corpora.

tokenizer.json files   copied under this name, with the files of their folder; tokenizer_config.json is completed or
                       written
sentencepiece models   copied as tokenizer.model, and converted to tokenizer.json: the class that transformers takes for
                       an architecture may split text in another way, or reads no sentencepiece model at all
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moba_train.data.tokenizer import CHAT_TEMPLATES, TIKTOKEN, TOKENIZER_CONFIG, tokenizer_file
from moba_train.errors import DataError
from moba_train.foreign_files import TOKENIZER_BYTES, parse_json, read_foreign
from moba_train.output_files import write_new
from moba_train.tools.chat.template import TemplateDefinition
from moba_train.tools.convert.sentencepiece_json import convert_sentencepiece
from moba_train.tools.inference.corpus_marks import CorpusMarks, token_ids
from moba_train.tools.text_tokenizer import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    Tokenizer,
    load_tokenizer,
    token_texts,
)

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
UNCONVERTED = "sentencepiece.model"
"""Name of a sentencepiece model without a tokenizer.json; a `SENTENCEPIECE` would be read, with other ids."""
_GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers that takes tokenizer.json as it is. Those of Llama and Qwen build parts of it again."""
_MARKS = ("bos_token", "eos_token", "pad_token")
"""Special tokens whose ids config.json gives."""
_QWEN2_CLASS = "Qwen2Tokenizer"
_BESIDE_ANY = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, *CHAT_TEMPLATES, GENERATION_CONFIG)
"""Files that belong to the tokenizer in the same folder, for any name of it."""
_BESIDE_JSON = (SENTENCEPIECE, "added_tokens.json", "vocab.json", "merges.txt")
"""Other forms of the vocabulary in a tokenizer.json."""
_KEYS_OF_OTHER_CLASSES = ("legacy", "sp_model_kwargs", "add_prefix_space", "use_default_system_prompt", "auto_map")
"""Keys of tokenizer_config.json that say how another class reads a sentencepiece model."""


@dataclass
class TokenizerExport:
    """The tokenizer's files, and what config.json takes from it."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by file name."""
    ids: dict[str, Any] = field(default_factory=dict)
    """`bos_token_id`, `eos_token_id` and `pad_token_id`; None for a token that does not exist; empty if unknown."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about parts that are left out, with reason and remedy."""

    def set_json(self, name: str, contents: dict[str, Any]) -> None:
        """Set the contents of file `name`."""
        self.files[name] = (json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode()


def export_tokenizer(
    tokenizer: str | None, marks: CorpusMarks, model_type: str, max_length: int, roots: Sequence[Path]
) -> TokenizerExport:
    """Files of a run's tokenizer, for a model that was trained on sequences of `max_length` tokens.

    tokenizer: path of data.tokenizer; None if the recipe names none
    marks: of the run's corpora
    model_type: of the exported model: "llama", "qwen2" or "qwen3"

    Raises DataError when a file cannot be read or does not lie below one of `roots`.
    """
    if tokenizer is None:
        return _without_tokenizer(marks)
    source = tokenizer_file(tokenizer)
    try:
        if source.suffix == ".json":
            export = _export_json(source, marks, max_length, roots)
        else:
            export = _export_sentencepiece(source, marks, max_length, roots)
        if marks.template is not None:
            _set_template(export, marks.template)
        elif marks.conversations and _has_template(export):
            export.warnings.append(
                "the chat template is the tokenizer's own: no corpus records the one that wrote its conversations, as "
                "with records of tokens; compare the two"
            )
    except (OSError, ValueError) as error:
        raise DataError(f"the tokenizer {tokenizer} cannot be exported: {error}") from error
    if model_type == "qwen2" and not export.warnings:
        own_class = str(_parse(export.files, TOKENIZER_CONFIG).get("tokenizer_class"))
        if own_class.removesuffix("Fast") != _QWEN2_CLASS:
            export.warnings.append(
                f"AutoTokenizer of transformers 5 takes {_QWEN2_CLASS} for every Qwen2 model (model.qkv_bias), which "
                f"splits text in its own way; load this tokenizer with {_GENERIC_CLASS}.from_pretrained"
            )
    if marks.other_templates:
        export.warnings.append(
            f"chat_template.jinja is not the template of {', '.join(marks.other_templates)}, which the model was "
            "trained on as well, but that of the conversations that it was trained on last"
        )
    return export


def _has_template(export: TokenizerExport) -> bool:
    named = "chat_template" in _parse(export.files, TOKENIZER_CONFIG)
    return named or not export.files.keys().isdisjoint(CHAT_TEMPLATES)


def _set_template(export: TokenizerExport, template: TemplateDefinition) -> None:
    """Let the template that wrote the conversations of training take the place of the tokenizer's own."""
    config = _parse(export.files, TOKENIZER_CONFIG)
    tokens = token_texts(config)
    # The model's folder that the template was taken from may have named other special tokens.
    other = {name: text for name, text in template.variables.items() if tokens.get(name) != text}
    used = [f"{{% set {name} = {json.dumps(text)} %}}\n" for name, text in other.items() if name in template.source]
    for name in CHAT_TEMPLATES:
        export.files.pop(name, None)
    export.files[CHAT_TEMPLATES[0]] = "".join([*used, template.source]).encode(errors="surrogatepass")
    if config.pop("chat_template", None) is not None:
        export.set_json(TOKENIZER_CONFIG, config)


def _without_tokenizer(marks: CorpusMarks) -> TokenizerExport:
    made_with = f"; its corpora were made with {marks.tokenizer}" if marks.tokenizer else ""
    remedy = "copy the tokenizer's files into the folder"
    if marks.tokenizer and marks.tokenizer.startswith(TIKTOKEN):
        remedy = "tiktoken encodings are not converted: copy the tokenizer.json of a model that uses this one"
    export = TokenizerExport(
        ids={"bos_token_id": marks.bos_id, "eos_token_id": marks.eos_id, "pad_token_id": None},
        warnings=[f"no tokenizer is exported: the recipe has no data.tokenizer{made_with}; {remedy}"],
    )
    _set_generation_config(export, marks)
    return export


def _export_json(source: Path, marks: CorpusMarks, max_length: int, roots: Sequence[Path]) -> TokenizerExport:
    # The folder of a file with another name may hold the vocabulary of another tokenizer.
    beside = _BESIDE_ANY + (_BESIDE_JSON if source.name == TOKENIZER_JSON else ())
    content = read_foreign(source, TOKENIZER_BYTES, roots)
    export = TokenizerExport({TOKENIZER_JSON: content} | _read_beside(source, beside, roots))
    try:
        _complete(export, marks, max_length)
        _set_generation_config(export, marks)
    except ValueError as error:
        export.warnings.append(f"the tokenizer's files are copied as they are, unchecked: {error}")
    return export


def _complete(export: TokenizerExport, marks: CorpusMarks, max_length: int) -> None:
    """Add the keys that tokenizer_config.json lacks to a tokenizer.json, let texts begin as the documents of training
    did, and set the ids. Raises ValueError when a file is not of the format in its name."""
    contents = _parse(export.files, TOKENIZER_JSON)
    vocabulary = _Vocabulary(contents)
    own = _given(_parse(export.files, TOKENIZER_CONFIG))
    completed: dict[str, Any] = {
        "tokenizer_class": _GENERIC_CLASS,
        "bos_token": vocabulary.text_of(marks.bos_id),
        "eos_token": vocabulary.text_of(marks.eos_id),
    }
    if not own:
        completed |= {"unk_token": vocabulary.unknown, "pad_token": vocabulary.padding} | _defaults(max_length, marks)
    completed = _given(completed | token_texts(_parse(export.files, SPECIAL_TOKENS_MAP))) | own
    if marks.tokenizer is not None:
        beginning = _beginning(vocabulary.text_of(marks.bos_id), marks.bos_id)
        changed = _additions(contents.get("post_processor")) != _additions(beginning)
        if changed:
            export.set_json(TOKENIZER_JSON, contents | {"post_processor": beginning})
        if changed or "add_bos_token" in own:
            completed["add_bos_token"] = beginning is not None
        if own.get("add_eos_token"):
            completed["add_eos_token"] = False
    if marks.conversations and "split_special_tokens" in own:
        completed["split_special_tokens"] = False
    # A file from its publisher that lacks nothing stays as it is, byte for byte.
    if completed != own:
        export.set_json(TOKENIZER_CONFIG, completed)
    texts = token_texts(completed)
    export.ids = {f"{key}_id": vocabulary.id_of(texts.get(key)) for key in _MARKS}


def _set_generation_config(export: TokenizerExport, marks: CorpusMarks) -> None:
    """Take over the ids in generation_config.json, which may name several ends of a text, or write the file. The tokens
    that ended the documents of training, and the turns of its conversations, also end an answer."""
    own = _parse(export.files, GENERATION_CONFIG)
    export.ids |= {key: own[key] for key in export.ids if own.get(key) is not None}
    ends = token_ids(export.ids.get("eos_token_id"))
    if added := sorted(marks.ends - {*ends}):
        export.ids["eos_token_id"] = [*ends, *added]
    if added or GENERATION_CONFIG not in export.files:
        export.set_json(GENERATION_CONFIG, own | _given(export.ids))


def _export_sentencepiece(source: Path, marks: CorpusMarks, max_length: int, roots: Sequence[Path]) -> TokenizerExport:
    tokenizer = load_tokenizer(source, roots)
    export = TokenizerExport(_read_beside(source, _BESIDE_ANY, roots))
    tokens = _sentencepiece_tokens(tokenizer, marks)
    texts = {key: tokenizer.processor.id_to_piece(index) for key, index in tokens.items()}
    own = {
        key: value for key, value in _parse(export.files, TOKENIZER_CONFIG).items() if key not in _KEYS_OF_OTHER_CLASSES
    }
    if marks.tokenizer is not None and "add_bos_token" in own:
        own["add_bos_token"] = marks.bos_id is not None
    add_bos = own.get("add_bos_token", marks.bos_id is not None)
    content = read_foreign(source, TOKENIZER_BYTES, roots)
    try:
        converted = json.loads(convert_sentencepiece(tokenizer))
    except DataError as error:
        export.files[UNCONVERTED] = content
        export.warnings.append(
            f"tokenizer.json is left out, and AutoTokenizer cannot load this folder: {error}. The tokenizer is in "
            f"{UNCONVERTED}; read it with the package sentencepiece"
        )
    else:
        export.files[SENTENCEPIECE] = content
        if add_bos and "bos_token" in tokens:
            converted["post_processor"] = _beginning(texts["bos_token"], tokens["bos_token"])
        export.set_json(TOKENIZER_JSON, converted)
    # As with our tokenizer, "</s>" in a text is four characters, not the end of a document. But publishers' templates
    # and texts spell out their special tokens, and so do conversations.
    defaults = _defaults(max_length, marks) | {"split_special_tokens": True}
    completed = texts | (_given(own) or defaults) | {"tokenizer_class": _GENERIC_CLASS}
    if marks.spelt_out(not export.files.keys().isdisjoint(CHAT_TEMPLATES)):
        completed["split_special_tokens"] = False
    export.set_json(TOKENIZER_CONFIG, completed)
    export.ids = {f"{key}_id": tokens.get(key) for key in _MARKS}
    _set_generation_config(export, marks)
    return export


def _defaults(max_length: int, marks: CorpusMarks) -> dict[str, Any]:
    """Keys of a tokenizer_config.json that has to be written: texts begin as the documents of training did, and stay
    open at their end, because a prompt is to be continued."""
    return {
        "add_bos_token": marks.bos_id is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def _sentencepiece_tokens(tokenizer: Tokenizer, marks: CorpusMarks) -> dict[str, int]:
    """Ids of special tokens by their keys in tokenizer_config.json: those of the corpora, or the model's own."""
    processor = tokenizer.processor
    ids = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id() if marks.bos_id is None else marks.bos_id,
        "eos_token": processor.eos_id() if marks.eos_id is None else marks.eos_id,
        "pad_token": processor.pad_id(),
    }
    return {key: index for key, index in ids.items() if 0 <= index < processor.vocab_size()}


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def _beginning(text: str | None, index: int | None) -> dict[str, Any] | None:
    """Post-processor of a tokenizer.json that puts a token before a text, or before each of two; None for no token.
    transformers 5 uses it for every class, transformers 4 uses `add_bos_token` for that of Llama."""
    if text is None:
        return None
    mark = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, _TEXT],
        "pair": [mark, _TEXT, mark, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _additions(post_processor: dict[str, Any] | None) -> list[Any]:
    """Additions of a post-processor to a text, step by step. Raises ValueError when it is not of the package
    tokenizers."""
    try:
        steps = [] if post_processor is None else post_processor.get("processors", [post_processor])
        # ByteLevel changes offsets alone; transformers 5 saves a template of the text alone.
        added = [step.get("single", step) for step in steps if step["type"] != "ByteLevel"]
        return [step for step in added if step != [_TEXT]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the post_processor of {TOKENIZER_JSON} cannot be read ({error!r})") from error


class _Vocabulary:
    """Ids and texts of the tokens of a tokenizer.json, read as JSON: exports need no package tokenizers for it."""

    def __init__(self, contents: dict[str, Any]) -> None:
        try:
            model = contents["model"]
            vocab = model["vocab"]
            listed = {text: index for index, (text, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
            added = {token["content"]: token["id"] for token in contents.get("added_tokens") or []}
            self._ids: dict[str, int] = listed | added
            self.unknown: str | None = model.get("unk_token")
            self.padding: str | None = (contents.get("padding") or {}).get("pad_token")
            if self.unknown is None and isinstance(vocab, list) and model.get("unk_id") is not None:
                self.unknown = vocab[model["unk_id"]][0]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{TOKENIZER_JSON} is not one of the package tokenizers ({error!r})") from error

    def id_of(self, text: str | None) -> int | None:
        """Id of the token `text`, or None if there is no such token."""
        return None if text is None else self._ids.get(text)

    def text_of(self, index: int | None) -> str | None:
        """Text of a token, or None if there is no such token."""
        return None if index is None else next((text for text, found in self._ids.items() if found == index), None)


def _read_beside(source: Path, names: Sequence[str], roots: Sequence[Path]) -> dict[str, bytes]:
    """Contents of the files among `names` in the folder of `source`."""
    files = {name: source.parent / name for name in names}
    return {name: read_foreign(file, TOKENIZER_BYTES, roots) for name, file in files.items() if file.exists()}


def _parse(files: dict[str, bytes], name: str) -> dict[str, Any]:
    """Object in the JSON file `name`; empty without the file. Raises ValueError when it holds no object."""
    try:
        contents = parse_json(files[name]) if name in files else {}
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{name} holds no JSON object")
    return contents


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def copy_tokenizer(folder: Path, output: Path, roots: Sequence[Path]) -> None:
    """Copy the tokenizer of `folder`, in all of its forms, into the folder `output`. Raises DataError, before anything
    is written, when a file cannot be read or does not lie below one of `roots`."""
    try:
        files = _read_beside(folder / TOKENIZER_JSON, (TOKENIZER_JSON, *_BESIDE_JSON, *_BESIDE_ANY), roots)
    except (OSError, ValueError) as error:
        raise DataError(f"the tokenizer {folder} cannot be copied: {error}") from error
    for name, content in files.items():
        write_new(output / name, content)
