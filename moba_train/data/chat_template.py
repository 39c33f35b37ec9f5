"""Chat templates: conversations as text, and which of it the assistant says.

A template is Jinja, as models carry it in `tokenizer_config.json`; it runs in a sandbox, without access to files,
attributes of Python objects, or the date. The spans with loss follow from the template itself: what it writes before an
assistant message, asked for a generation prompt, is the prompt that the model will see; what follows, up to and with
the end of the turn, is what it has to say.
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
"""Template and end of a turn, by name."""


class Segment(NamedTuple):
    """A stretch of a conversation's text."""

    text: str
    in_loss: bool


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, with which some templates mark the assistant's words: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template and the text that ends a turn.

    variables  what the template may use besides the messages: a model's special tokens, such as `bos_token`

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
        """The messages as text; with the beginning of an assistant message if asked for. Raises ValueError when the
        template refuses them."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._variables
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses it: {error}") from error

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The text of `messages`, cut where loss begins and ends: at each assistant message.

        Raises ValueError when there is no assistant message, a message contains the end of a turn, or the template does
        not write a conversation as the continuation of its own prompts.
        """
        for message in messages:
            if self.end_of_turn in message["content"]:
                raise ValueError(f"a message contains {self.end_of_turn!r}, which ends a turn")
        text, at = self.render(messages), 0
        segments = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], add_generation_prompt=True)
            if not text.startswith(prompt) or len(prompt) < at:
                raise ValueError(
                    f"before assistant message {index} the chat template writes another text than as a prompt; its "
                    "loss cannot be told from it"
                )
            end = text.find(self.end_of_turn, len(prompt))
            if end < 0:
                raise ValueError(f"the chat template does not end message {index} with {self.end_of_turn!r}")
            end += len(self.end_of_turn)
            segments += [Segment(text[at : len(prompt)], False), Segment(text[len(prompt) : end], True)]
            at = end
        if not segments:
            raise ValueError("no assistant message")
        return [segment for segment in (*segments, Segment(text[at:], False)) if segment.text]


def _refuse(message: str) -> None:
    raise TemplateError(message)


def load_chat_template(name: str, end_of_turn: str | None = None) -> ChatTemplate:
    """A built-in template by name, a Jinja file, or the template of a model's folder (`chat_template.jinja` or
    `tokenizer_config.json`).

    `end_of_turn` is required with a file; a folder's default is its `eos_token`. Raises DataError when there is no such
    template, or its end of turn is not known.
    """
    if name in BUILT_IN:
        source, end = BUILT_IN[name]
        return ChatTemplate(source, end_of_turn or end)
    path = Path(name)
    if not path.exists():
        raise DataError(f"chat template {name}: neither {', '.join(BUILT_IN)} nor a file or folder")
    try:
        source, variables = _of_folder(path) if path.is_dir() else (path.read_text(encoding="utf-8"), {})
    except (OSError, ValueError) as error:
        raise DataError(f"chat template {name} cannot be read: {error}") from error
    end_of_turn = end_of_turn or variables.get("eos_token")
    if not end_of_turn:
        raise DataError(f"chat template {name}: what ends a turn is not known; give --end-of-turn")
    return ChatTemplate(source, end_of_turn, variables)


def _of_folder(folder: Path) -> tuple[str, dict[str, str]]:
    """The template of a model's folder and its special tokens. Raises OSError, ValueError."""
    variables = special_tokens(folder)
    if (own := folder / "chat_template.jinja").exists():
        return own.read_text(encoding="utf-8"), variables
    file = folder / "tokenizer_config.json"
    source = json.loads(file.read_bytes()).get("chat_template") if file.exists() else None
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ValueError("its tokenizer_config.json has no chat_template")
    return source, variables
