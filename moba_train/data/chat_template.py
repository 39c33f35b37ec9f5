"""Chat templates: conversations as text, and which part of the text carries loss.

A template is Jinja, as models ship it in `tokenizer_config.json`. It runs in a sandbox, without access to files,
attributes of Python objects, or the date; `confined_template` limits the time and memory of one from elsewhere. The
template itself determines what carries loss: the text that it writes
before an assistant message, with a generation prompt, is the prompt that the model will see. The text after it, up to
and including the end of the turn, carries loss.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


class Template(Protocol):
    """The interface of a chat template that fine-tuning needs: `ChatTemplate`, here or in a process of its own."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The messages as text. Raises ValueError when the template refuses them."""
        ...

    def segments(self, messages: Sequence[Message]) -> list[TemplateSegment]:
        """The text of `messages`, split where loss begins and ends. Raises ValueError when they cannot be used."""
        ...

    def all_segments(self, conversations: Iterable[Sequence[Message]]) -> Iterator[list[TemplateSegment] | ValueError]:
        """The segments of each conversation, in order, or the error of `segments`. May read `conversations` ahead."""
        ...


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
        except (TemplateError, RecursionError, OverflowError, ValueError) as error:
            raise DataError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The messages as text, followed by the beginning of an assistant message if `add_generation_prompt`.

        Raises ValueError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._variables
            )
        except MemoryError:
            raise
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

    def all_segments(self, conversations: Iterable[Sequence[Message]]) -> Iterator[list[TemplateSegment] | ValueError]:
        """The segments of each conversation, in order, or the error of `segments`."""
        for messages in conversations:
            try:
                yield self.segments(messages)
            except ValueError as error:
                yield error


def _refuse(message: str) -> None:
    raise TemplateError(message)
