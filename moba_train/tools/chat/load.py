"""Chat templates by name, or from a file or a model's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moba_train.data.tokenizer import CHAT_TEMPLATES, TOKENIZER_CONFIG, tokenizer_file
from moba_train.errors import DataError
from moba_train.foreign_files import folder_roots, read_foreign, read_foreign_json
from moba_train.tools.chat.confined_template import ConfinedTemplate
from moba_train.tools.chat.template import BUILT_IN, ChatTemplate, TemplateDefinition
from moba_train.tools.text_tokenizer import read_object, special_tokens

Template = ChatTemplate | ConfinedTemplate
"""A chat template, in this process or in one of its own."""
TEMPLATE_BYTES = 1 << 20
"""Largest chat template; those of models have up to 20 kB."""


def load_chat_template(name: str, end_of_turn: str | None = None) -> Template:
    """Load a built-in template by name, a Jinja file, or the template of a model's folder (`chat_template.jinja` or
    `tokenizer_config.json`). One that is not built in runs in a process of its own.

    `end_of_turn` is required with a file; with a folder it defaults to the `eos_token`. Raises DataError when there is
    no such template, or its end of turn is unknown or empty.
    """
    if end_of_turn == "":
        raise DataError("--end-of-turn: given ''; allowed: non-empty text, such as <|im_end|>")
    if name in BUILT_IN:
        source, end = BUILT_IN[name]
        return ChatTemplate(source, end_of_turn or end)
    path = Path(name)
    if not path.exists():
        raise DataError(f"chat template {name}: not a file or folder, and none of the built-in {', '.join(BUILT_IN)}")
    try:
        source, variables = _read_folder(path) if path.is_dir() else (read_foreign(path, TEMPLATE_BYTES).decode(), {})
    except (OSError, ValueError) as error:
        raise DataError(f"chat template {name} cannot be read: {error}") from error
    end_of_turn = end_of_turn or variables.get("eos_token")
    if not end_of_turn:
        raise DataError(f"chat template {name}: the text that ends a turn is unknown; give --end-of-turn")
    return ConfinedTemplate(source, end_of_turn, variables)


def parse_definition(value: Any) -> TemplateDefinition | None:
    """The template that a sidecar or checkpoint records under `chat_template`; None if that is none."""
    if not isinstance(value, dict):
        return None
    source, end_of_turn, variables = (value.get(key) for key in TemplateDefinition._fields)
    if not (isinstance(source, str) and len(source) <= TEMPLATE_BYTES and isinstance(end_of_turn, str) and end_of_turn):
        return None
    given = variables.items() if isinstance(variables, dict) else ()
    return TemplateDefinition(source, end_of_turn, {key: text for key, text in given if isinstance(text, str)})


def recorded_template(definition: TemplateDefinition) -> Template:
    """A template that was recorded with a corpus; in a process of its own unless it is built in. Raises DataError when
    it is not Jinja."""
    built_in = definition[:2] in BUILT_IN.values()
    return ChatTemplate(*definition) if built_in else ConfinedTemplate(*definition)


def has_chat_template(path: str | Path, roots: Sequence[Path] | None = None) -> bool:
    """True if the folder of the tokenizer at `path` has a chat template. Raises DataError as `special_tokens`."""
    folder = tokenizer_file(path).parent
    own = any((folder / name).exists() for name in CHAT_TEMPLATES)
    return own or "chat_template" in read_object(folder / TOKENIZER_CONFIG, roots)


def _read_folder(folder: Path) -> tuple[str, dict[str, str]]:
    """Template and special tokens of a model's folder. Raises OSError, ValueError."""
    roots = folder_roots(folder)
    variables = special_tokens(folder, roots)
    if (own := folder / "chat_template.jinja").exists():
        return read_foreign(own, TEMPLATE_BYTES, roots).decode(), variables
    file = folder / TOKENIZER_CONFIG
    config = read_foreign_json(file, roots=roots) if file.exists() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if isinstance(source, str) and len(source) > TEMPLATE_BYTES:
        raise ValueError(f"its template has {len(source):,} characters; allowed: {TEMPLATE_BYTES:,}")
    if not isinstance(source, str):
        raise ValueError(f"it has no {own.name}, and no chat_template in a {TOKENIZER_CONFIG}")
    return source, variables
