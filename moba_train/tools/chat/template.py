"""Chat templates: conversations as text, split where loss begins and ends.

A template is Jinja, as models ship it in `tokenizer_config.json`. It runs in a sandbox, without access to files,
attributes of Python objects, or the date; `confined_template` limits the time and memory of one from elsewhere. The
template itself determines the part that carries loss: the text that it writes before an assistant message, with a
generation prompt, is the prompt that the model will see. The text after it, up to and including the end of the turn,
carries loss: the assistant's text and its tool calls.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moba_train.errors import DataError

Message = dict[str, Any]
"""`role` and `content`, as templates expect them. An assistant message may have `tool_calls`, and then `content` may be
None; its `weight` of 0 excludes it from the loss. A tool's result may name its call under `tool_call_id`."""

_CHATML_CALLS = """\
{%- macro calls(message) %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""
_CHATML_PROMPT = """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_CHATML = (
    _CHATML_CALLS
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {{- calls(message) if message.tool_calls }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""
    + _CHATML_PROMPT
)
_NO_TOOLS = """\
{%- if tools %}
    {{- raise_exception('NAME has no place for a list of tools; give the folder of a model that has: --template') }}
{%- endif %}
"""
_QWEN = (
    _NO_TOOLS.replace("NAME", "qwen")
    + _CHATML_CALLS
    + """\
{%- if not messages or messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {{- calls(message) if message.tool_calls }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
    + _CHATML_PROMPT
)
_LLAMA3 = (
    _NO_TOOLS.replace("NAME", "llama3")
    + """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message.content or '') | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '{"name": ' + call.function.name | tojson }}
        {{- ', "parameters": ' + call.function.arguments | tojson + '}' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
)
BUILT_IN = {
    "chatml": (_CHATML, "<|im_end|>"),
    "llama3": (_LLAMA3, "<|eot_id|>"),
    "qwen": (_QWEN, "<|im_end|>"),
}
"""Built-in templates by name: the template, and the text that ends a turn."""


class Conversation(NamedTuple):
    """Messages, and the tools that the assistant may call."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """JSON schemas of the tools; None: the record lists none."""


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys of objects included, in no particular order."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            waiting += found


class TemplateSegment(NamedTuple):
    """Consecutive text of a conversation that all carries loss, or none."""

    text: str
    in_loss: bool


def template_fingerprint(source: str, end_of_turn: str, variables: dict[str, str] | None) -> str:
    """SHA-256 of a template, the text that ends a turn and the special tokens, in hexadecimal."""
    return hashlib.sha256(json.dumps([source, end_of_turn, variables or {}], sort_keys=True).encode()).hexdigest()


class Template(Protocol):
    """Interface of a chat template that fine-tuning needs: a `ChatTemplate`, in this process or another one."""

    @property
    def end_of_turn(self) -> str:
        """Text that ends a turn."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the template's output, in hexadecimal."""
        ...

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """The messages as text. Raises ValueError when the template refuses them."""
        ...

    def segments(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[TemplateSegment]:
        """The text of `messages`, split where loss begins and ends. Raises ValueError when they cannot be used."""
        ...

    def all_segments(self, conversations: Iterable[Conversation]) -> Iterator[list[TemplateSegment] | ValueError]:
        """Yield the segments of each conversation, in order, or the error of `segments`. May read `conversations`
        ahead."""
        ...


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %} ... {% endgeneration %}`, which in some templates is assistant text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template and the text that ends a turn.

    variables: names that the template can use in addition to the messages: a model's special tokens, such as
        `bos_token`

    Raises DataError when the template is not Jinja.
    """

    def __init__(self, source: str, end_of_turn: str, variables: dict[str, str] | None = None) -> None:
        self.end_of_turn = end_of_turn
        self.fingerprint = template_fingerprint(source, end_of_turn, variables)
        self._variables = variables or {}
        # The settings with which transformers renders templates; sandboxed, as a template comes with a model from
        # elsewhere.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, OverflowError, ValueError) as error:
            raise DataError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """The messages as text, followed by the beginning of an assistant message if `add_generation_prompt`.

        Raises ValueError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
                **self._variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def segments(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[TemplateSegment]:
        """The text of `messages`, split where loss begins and ends.

        Raises ValueError when no assistant message carries loss, a message contains the end of a turn, or the template
        leaves out a tool, or does not render a conversation as a continuation of its own prompts.
        """
        if any(self.end_of_turn in text for text in texts([messages, tools])):
            raise ValueError(f"a message contains {self.end_of_turn!r}, which ends a turn")
        text = self.render(messages, tools=tools)
        _require_names(text, tools or [], "the list of tools")
        at = 0
        segments = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            begin, end = self._answer(text, messages, index, tools)
            if begin < at:
                raise ValueError(_differs(index))
            _require_names(text[begin:end], message.get("tool_calls") or [], f"the tool calls of message {index}")
            segments += [TemplateSegment(text[at:begin], False), TemplateSegment(text[begin:end], True)]
            at = end
        if not segments:
            roles = {message["role"] for message in messages}
            raise ValueError(
                "every assistant message has weight 0: nothing carries loss"
                if "assistant" in roles
                else "no assistant message"
            )
        return [segment for segment in (*segments, TemplateSegment(text[at:], False)) if segment.text]

    def _answer(
        self, text: str, messages: Sequence[Message], index: int, tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        """Begin and end in the conversation's `text` of the answer of assistant message `index`."""
        prompt = self.render(messages[:index], add_generation_prompt=True, tools=tools)
        if not text.startswith(prompt):
            raise ValueError(_differs(index))
        # A message that ends in another way would carry loss on to the end of the next one, such as a tool's result.
        alone = self.render(messages[: index + 1], tools=tools) if index + 1 < len(messages) else text
        end = text.find(self.end_of_turn, len(prompt))
        if end < 0 or self.end_of_turn not in alone[len(prompt) :]:
            raise ValueError(f"the chat template does not end message {index} with {self.end_of_turn!r}")
        return len(prompt), end + len(self.end_of_turn)

    def all_segments(self, conversations: Iterable[Conversation]) -> Iterator[list[TemplateSegment] | ValueError]:
        """Yield the segments of each conversation, in order, or the error of `segments`."""
        for conversation in conversations:
            try:
                yield self.segments(*conversation)
            except ValueError as error:
                yield error


def _differs(index: int) -> str:
    return (
        f"the chat template renders the text before assistant message {index} differently as a prompt, so the text "
        "that carries loss cannot be determined"
    )


def _require_names(text: str, tools: Sequence[Any], what: str) -> None:
    """Raise ValueError when `text` lacks the name of a tool or tool call, because the template does not write it."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise ValueError(f"a tool in {what} has no name")
        if name not in text:
            raise ValueError(f"the chat template leaves out {what} (no {name!r}); give a template that supports tools")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` with the signature that it has in transformers. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
