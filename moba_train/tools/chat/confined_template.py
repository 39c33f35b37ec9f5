"""A chat template from elsewhere, run in a process of its own with limits on processor time and memory.

Jinja's sandbox keeps a template from files and from the inside of Python objects. It does not keep it from looping for
ever, or from doubling a text until the memory is full, and already its compiler evaluates constants. So the template is
compiled and rendered in a `ConfinedProcess`. A conversation that exceeds the limits is refused, and the next one has
another process. The built-in templates need none of this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from moba_train.errors import DataError
from moba_train.tools.chat.template import (
    ChatTemplate,
    Conversation,
    Message,
    SplitConversation,
    TemplateDefinition,
    TemplateSegment,
    texts,
)
from moba_train.tools.confined_process import BreachError, ConfinedProcess, WorkLimits

BATCH_CHARACTERS = 1 << 16
"""Text that is rendered at a time. With conversations of 1,700 characters on average `moba-data sft` runs at 0.91 of
its speed with the template in this process, and at 0.62 if each conversation is sent by itself."""


LIMITS = WorkLimits(seconds=30, memory=1 << 30, reply=1 << 20, growth=16)
"""For one conversation, or several short ones. There is as much time for each 100 answers, as every answer is rendered
with all that is before it, and one more `growth` for each answer, which has a sample of its own where the template
drops thoughts of earlier turns."""
BREACHES = 5
"""Conversations that may exceed a limit before a template is given up."""


class ConfinedTemplate:
    """A `ChatTemplate` in a process of its own. Arguments, methods and errors are those of `ChatTemplate`.

    A conversation that exceeds one of `limits` raises ValueError; after `BREACHES` of them, DataError.
    """

    def __init__(
        self,
        source: str,
        end_of_turn: str,
        variables: dict[str, str] | None = None,
        limits: WorkLimits = LIMITS,
    ) -> None:
        self.definition = TemplateDefinition(source, end_of_turn, variables or {})
        self._breaches = 0
        self._limits = limits
        setup = [source, end_of_turn, variables]
        self._process = ConfinedProcess(__name__, "the chat template", setup, b"", self._work([]))
        try:
            self._send([])
            self._process.receive()
        except ValueError as error:
            raise DataError(str(error)) from None

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
        text: str = self._result(["render", messages, add_generation_prompt, tools, variables])
        return text

    def split(self, conversation: Conversation) -> SplitConversation:
        """The text of a conversation, split where loss begins and ends. Raises ValueError as `ChatTemplate.split`."""
        return _split(self._result(["split", conversation]))

    def split_all(self, conversations: Iterable[Conversation]) -> Iterator[SplitConversation | ValueError]:
        """The result of `split` for each conversation, in order, or its error.

        Conversations travel in batches, and the child renders the next batch while the caller works on this one.
        """
        sent = map(self._send, _batches(conversations))
        calls = next(sent, None)
        while calls:
            results = self._results(calls)
            calls = next(sent, None)
            yield from (found if isinstance(found, ValueError) else _split(found) for found in results)

    def _result(self, call: list[Any]) -> Any:
        """The result of one call: the name of a method of `ChatTemplate`, and its arguments. Raises its ValueError."""
        (found,) = self._results(self._send([call]))
        if isinstance(found, ValueError):
            raise found
        return found

    def _results(self, calls: list[Any]) -> list[Any]:
        """The results of the calls that were sent, or their ValueErrors; one by one if all together exceed a limit.
        Raises DataError after too many of these."""
        try:
            results, _ = self._process.receive()
            return [result if error is None else ValueError(error) for result, error in results]
        except BreachError as error:
            if len(calls) > 1:
                return [found for call in calls for found in self._results(self._send([call]))]
            self._breaches += 1
            if self._breaches >= BREACHES:
                raise DataError(f"{error}, as in {self._breaches - 1} conversations before; give another") from None
            return [error]

    def _send(self, calls: list[Any]) -> list[Any]:
        """Send calls to the child. Returns the calls."""
        self._process.send(calls, b"", self._work(calls))
        return calls

    def _work(self, calls: list[Any]) -> WorkLimits:
        """Limits on these calls together."""
        messages = (message for method, *given in calls if method == "split" for message in given[0].messages)
        answers = sum(message["role"] == "assistant" for message in messages)
        of_one = self._limits
        return of_one._replace(seconds=of_one.seconds * (1 + answers // 100), growth=of_one.growth + answers)


def _split(found: list[Any]) -> SplitConversation:
    samples, unread, left_out = found
    return SplitConversation(
        [[TemplateSegment(*segment) for segment in sample] for sample in samples], unread, left_out
    )


def _batches(conversations: Iterable[Conversation]) -> Iterator[list[Any]]:
    """Calls of `split` for consecutive conversations of about `BATCH_CHARACTERS` characters."""
    batch: list[Any] = []
    size = 0
    for conversation in conversations:
        batch.append(["split", conversation])
        size += sum(map(len, texts(conversation)))
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def made(setup: list[Any], _: memoryview) -> Callable[[Any, memoryview], tuple[Any, bytes]]:
    """In the child: compile the template, and return what answers calls. Raises DataError."""
    template = ChatTemplate(*setup)
    return lambda calls, _: ([_answer(template, *call) for call in calls], b"")


def _answer(template: ChatTemplate, method: str, *arguments: Any) -> tuple[Any, str | None]:
    """Result and error of a call."""
    try:
        if method == "split":
            return template.split(Conversation(*arguments[0])), None
        return template.render(*arguments), None
    except ValueError as error:
        return None, str(error)
