"""Chat templates: conversations as text, split where loss begins and ends.

A template is Jinja, as models ship it in `tokenizer_config.json`. It runs in a sandbox, without access to files,
attributes of Python objects, or the date; `confined_template` limits the time and memory of one from elsewhere. The
template itself determines the part that carries loss: the text that it writes before an assistant message, with a
generation prompt, is the prompt that the model will see. The text after it, up to and including the end of the turn,
carries loss: the assistant's text and its tool calls.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moba_train.errors import DataError

Message = dict[str, Any]
"""`role` and `content`, as templates expect them. An assistant message may have `tool_calls`, and then `content` may be
None; its `weight`, 0 to 1, is that of its tokens in the loss, and `thought_weight` a factor on it for its thoughts
(`THOUGHTS`). Other keys are for the template."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages have thoughts."""

_CHATML = """\
{%- macro calls(message) %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
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
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{%- if tools %}
    {{- raise_exception('llama3 has no place for a list of tools; give --template chatml or a model that has one') }}
{%- endif %}
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
BUILT_IN = {
    "chatml": (_CHATML, "<|im_end|>"),
    "llama3": (_LLAMA3, "<|eot_id|>"),
}
"""Built-in templates by name: the template, and the text that ends a turn."""


class Conversation(NamedTuple):
    """Messages, the tools that the assistant may call, and what else a record says."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """JSON schemas of the tools; None: the record lists none."""
    variables: dict[str, Any] | None = None
    """Names that the template can use: a record's `chat_template_kwargs`, such as `enable_thinking`."""
    unread: Sequence[str] = ()
    """Keys of the record that none of this comes from."""


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
    """Consecutive text of a conversation that all carries loss with one weight, or none."""

    text: str
    weight: float
    """Weight of each token in the loss; 0: none."""
    ends_answer: bool = False
    """True if the text ends an answer that carries loss."""

    @property
    def in_loss(self) -> bool:
        """True if the text carries loss."""
        return self.weight > 0


class SplitConversation(NamedTuple):
    """Text of a conversation, split where loss begins and ends, and what of the conversation is not in it."""

    samples: list[list[TemplateSegment]]
    """Usually one. Where the template drops the thoughts of earlier turns, one for each turn, ordered by length."""
    unread: list[str]
    """Keys that change nothing in the text: `messages[].KEY` once for each such message, `chat_template_kwargs.KEY`, or
    the `KEY` of a record."""
    left_out: int
    """Messages after the last answer that carries loss."""


class _Answer(NamedTuple):
    """A conversation up to an assistant message, as text, and the place of that answer in it."""

    text: str
    begin: int
    end: int
    weight: float
    thought: tuple[int, int, float]
    """Beginning and end of the message's thought in the text, and its weight."""

    @property
    def whole(self) -> str:
        """Text up to the end of the answer's turn."""
        return self.text[: self.end]


class TemplateDefinition(NamedTuple):
    """Everything that determines what a chat template writes, as the sidecars of corpora record it."""

    source: str
    """Jinja."""
    end_of_turn: str
    """Text that ends a turn."""
    variables: dict[str, str]
    """Names that the template can use in addition to the messages: a model's special tokens, such as `bos_token`."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()


_OTHERWISE_CHECKED = ("role", "weight", "thought_weight", "tool_calls")
"""Keys of messages that are not named when the template does not read them."""


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
        self.definition = TemplateDefinition(source, end_of_turn, variables or {})
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
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The messages as text, followed by the beginning of an assistant message if `add_generation_prompt`.

        Raises ValueError when the template refuses the messages.
        """
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(
                self.definition.variables | (variables or {}) | given | {"tools": list(tools) if tools else None}
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def split(self, conversation: Conversation) -> SplitConversation:
        """The text of a conversation, split where loss begins and ends.

        Raises ValueError when no assistant message carries loss, a message contains the end of a turn, or the template
        leaves out a tool, or does not render an answer as a continuation of its prompt.
        """
        messages = conversation.messages
        if any(self.definition.end_of_turn in text for text in texts(conversation)):
            raise ValueError(f"a message contains {self.definition.end_of_turn!r}, which ends a turn")
        try:
            answers = self._answers(conversation)
        except ValueError as error:
            order = _unusual_order(messages)
            raise ValueError(f"{order}; {error}" if order else str(error)) from None
        last = max(answers)
        _require_names(answers[last].text, conversation.tools or [], "the list of tools")
        samples = []
        waiting = list(answers)
        while waiting:
            text = answers[waiting[-1]].text
            found = [index for index in waiting if text.startswith(answers[index].whole)]
            samples.append(_segments(text, {index: answers[index] for index in found}))
            # What this text writes in another way than it was written as an answer needs a sample of its own.
            waiting = [index for index in waiting if index not in found]
        unread = [*conversation.unread, *self._unread(conversation, answers)]
        return SplitConversation(samples[::-1], unread, len(messages) - 1 - last)

    def split_all(self, conversations: Iterable[Conversation]) -> Iterator[SplitConversation | ValueError]:
        """Yield the result of `split` for each conversation, in order, or its error."""
        for conversation in conversations:
            try:
                yield self.split(conversation)
            except ValueError as error:
                yield error

    def _answers(self, conversation: Conversation) -> dict[int, _Answer]:
        """Answers that carry loss by the index of their message, in order; at least one. Raises ValueError."""
        roles = {message["role"] for message in conversation.messages}
        if "assistant" not in roles:
            raise ValueError("no assistant message")
        found = {
            index: self._answer(conversation, index)
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and message.get("weight", 1) != 0
        }
        if not found:
            raise ValueError("every assistant message has weight 0: nothing carries loss")
        return found

    def _answer(self, conversation: Conversation, index: int) -> _Answer:
        messages, tools, variables, _ = conversation
        prompt = self.render(messages[:index], True, tools, variables)
        text = self.render(messages[: index + 1], False, tools, variables)
        if not text.startswith(prompt):
            thoughts = [key for key in THOUGHTS if messages[index].get(key)]
            if thoughts and (variables or {}).get("enable_thinking") is False:
                raise ValueError(f"{_differs(index)}; with enable_thinking: false leave its {thoughts[0]} out")
            raise ValueError(_differs(index))
        end = text.find(self.definition.end_of_turn, len(prompt))
        if end < 0:
            raise ValueError(self._other_end(index, text[len(prompt) :], messages[index].get("content") or ""))
        weight = messages[index].get("weight", 1)
        thought = _thought(messages[index], text, len(prompt), end)
        answer = _Answer(text, len(prompt), end + len(self.definition.end_of_turn), weight, thought)
        calls = messages[index].get("tool_calls") or []
        _require_names(answer.whole[answer.begin :], calls, f"the tool calls of message {index}")
        return answer

    def _other_end(self, index: int, answer: str, content: str) -> str:
        """Reason why an answer has no end, with the text that seems to end it."""
        rest = answer.rpartition(content.strip())[2].strip() if content.strip() else ""
        seems = f"; it writes {rest!r} there" if rest else ""
        return (
            f"the chat template does not end message {index} with {self.definition.end_of_turn!r}{seems}: give the "
            "text that ends a turn as --end-of-turn"
        )

    def _unread(self, conversation: Conversation, answers: dict[int, _Answer]) -> Iterator[str]:
        """Yield the keys that change nothing in the text up to the next answer, as `SplitConversation.unread` does."""
        messages, tools, variables, _ = conversation
        last = max(answers)
        for index, message in enumerate(messages[: last + 1]):
            answer = min(other for other in answers if other >= index)
            text = answers[answer].text
            for key, value in message.items():
                if not value or key in _OTHERWISE_CHECKED or (key == "content" and value.strip() in text):
                    continue
                without = {other: message[other] for other in message if other != key}
                others = [*messages[:index], without | {"content": ""} if key == "content" else without]
                if self._writes(text, [*others, *messages[index + 1 : answer + 1]], tools, variables):
                    yield f"messages[].{key}"
        for key in variables or {}:
            without = {other: value for other, value in (variables or {}).items() if other != key}
            with suppress(ValueError):
                if self._answer(conversation._replace(variables=without), last) == answers[last]:
                    yield f"chat_template_kwargs.{key}"

    def _writes(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, variables: dict[str, Any] | None
    ) -> bool:
        """True if the template writes `text` for these messages."""
        try:
            return self.render(messages, False, tools, variables) == text
        except ValueError:
            return False


def _segments(text: str, answers: dict[int, _Answer]) -> list[TemplateSegment]:
    """The text of a conversation, split where these answers in it begin and end. Raises ValueError when one begins
    before another one ends."""
    at = 0
    segments = []
    for index, (_, begin, end, weight, (first, last, thought_weight)) in answers.items():
        if begin < at:
            raise ValueError(_differs(index))
        segments += [TemplateSegment(text[at:begin], 0), TemplateSegment(text[begin:first], weight)]
        segments += [TemplateSegment(text[first:last], thought_weight), TemplateSegment(text[last:end], weight, True)]
        at = end
    return [segment for segment in (*segments, TemplateSegment(text[at:], 0)) if segment.text]


def _thought(message: Message, text: str, begin: int, end: int) -> tuple[int, int, float]:
    """Beginning and end in `text` of the message's thought, and its weight; nothing where that is the message's, or no
    thought is written between `begin` and `end`."""
    weight = message.get("thought_weight", 1)
    thought = next((message[key].strip() for key in THOUGHTS if isinstance(message.get(key), str)), "")
    place = text.find(thought, begin, end) if thought and weight != 1 else -1
    if place < 0:
        return begin, begin, 0
    last = place + len(thought)
    last += len(text[last:end]) - len(text[last:end].lstrip("\r\n"))  # tokenizers join line breaks to what is before
    return place, last, weight * message.get("weight", 1)


def _unusual_order(messages: Sequence[Message]) -> str:
    """Words for an order of messages that some templates refuse; empty for the usual one."""
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer", "tool")]
    if roles[:1] == ["assistant"]:
        return "the conversation begins with an assistant message"
    for one, other in itertools.pairwise(messages):
        if one["role"] == other["role"] and one["role"] in ("user", "assistant"):
            return f"two messages of role {one['role']!r} in a row"
    return ""


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
