"""Chat templates: conversations as text, and which part of the text carries loss.

A template is Jinja, as models ship it in `tokenizer_config.json`. It runs in a sandbox, without access to files,
attributes of Python objects, or the date. The template itself determines what carries loss: the text that it writes
before an assistant message, with a generation prompt, is the prompt that the model will see. The text after it, up to
and including the end of the turn, carries loss.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moba_train.data.tokenizer import special_tokens
from moba_train.errors import DataError

Message = dict[str, str]
"""`role` and `content`."""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_QWEN = """\
{%- if not messages or messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
BUILT_IN = {
    "chatml": (_CHATML, "<|im_end|>"),
    "llama3": (_LLAMA3, "<|eot_id|>"),
    "qwen": (_QWEN + _CHATML, "<|im_end|>"),
}
"""Built-in templates by name: the template, and the text that ends a turn."""


class TemplateSegment(NamedTuple):
    """Consecutive text of a conversation that all carries loss, or none."""

    text: str
    in_loss: bool


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %} ... {% endgeneration %}`, which in some templates is assistant text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template and the text that ends a turn.

    variables  names that the template can use besides the messages: a model's special tokens, such as `bos_token`

    Raises DataError when the template is not Jinja.
    """

    def __init__(self, source: str, end_of_turn: str, variables: dict[str, str] | None = None) -> None:
        self.end_of_turn = end_of_turn
        self._variables = variables or {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The messages as text, followed by the beginning of an assistant message if `add_generation_prompt`.

        Raises ValueError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._variables
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def segments(self, messages: Sequence[Message]) -> list[TemplateSegment]:
        """The text of `messages`, split where loss begins and ends.

        Raises ValueError when there is no assistant message, a message contains the end of a turn, or the template does
        not render a conversation as a continuation of its own prompts.
        """
        for message in messages:
            if self.end_of_turn in message["content"]:
                raise ValueError(f"a message contains {self.end_of_turn!r}, which ends a turn")
        text = self.render(messages)
        at = 0
        segments = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], add_generation_prompt=True)
            if not text.startswith(prompt) or len(prompt) < at:
                raise ValueError(
                    f"the chat template renders the text before assistant message {index} differently as a prompt, so "
                    "the text that carries loss cannot be determined"
                )
            end = text.find(self.end_of_turn, len(prompt))
            if end < 0:
                raise ValueError(f"the chat template does not end message {index} with {self.end_of_turn!r}")
            end += len(self.end_of_turn)
            segments += [TemplateSegment(text[at : len(prompt)], False), TemplateSegment(text[len(prompt) : end], True)]
            at = end
        if not segments:
            raise ValueError("no assistant message")
        return [segment for segment in (*segments, TemplateSegment(text[at:], False)) if segment.text]


def _refuse(message: str) -> None:
    raise TemplateError(message)


def load_chat_template(name: str, end_of_turn: str | None = None) -> ChatTemplate:
    """Load a built-in template by name, a Jinja file, or the template of a model's folder (`chat_template.jinja` or
    `tokenizer_config.json`).

    `end_of_turn` is required with a file; with a folder it defaults to the `eos_token`. Raises DataError when there is
    no such template, or its end of turn is unknown.
    """
    if name in BUILT_IN:
        source, end = BUILT_IN[name]
        return ChatTemplate(source, end_of_turn or end)
    path = Path(name)
    if not path.exists():
        raise DataError(f"chat template {name}: not a file or folder, and none of the built-in {', '.join(BUILT_IN)}")
    try:
        source, variables = _read_folder(path) if path.is_dir() else (path.read_text(encoding="utf-8"), {})
    except (OSError, ValueError) as error:
        raise DataError(f"chat template {name} cannot be read: {error}") from error
    end_of_turn = end_of_turn or variables.get("eos_token")
    if not end_of_turn:
        raise DataError(f"chat template {name}: the text that ends a turn is unknown; give --end-of-turn")
    return ChatTemplate(source, end_of_turn, variables)


def _read_folder(folder: Path) -> tuple[str, dict[str, str]]:
    """Template and special tokens of a model's folder. Raises OSError, ValueError."""
    variables = special_tokens(folder)
    if (own := folder / "chat_template.jinja").exists():
        return own.read_text(encoding="utf-8"), variables
    file = folder / "tokenizer_config.json"
    source = json.loads(file.read_bytes()).get("chat_template") if file.exists() else None
    if isinstance(source, list):  # several templates with names
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ValueError("its tokenizer_config.json has no chat_template")
    return source, variables
