"""A chat template from elsewhere, run in a process of its own with limits on processor time and memory.

Jinja's sandbox keeps a template from files and from the inside of Python objects. It does not keep it from looping for
ever, or from doubling a text until the memory is full, and already its compiler evaluates constants. So the template is
compiled and rendered in a child process, whose limits the kernel enforces whatever the template is made of. A
conversation that exceeds them is refused, and the child is started again for the next one.

Requests and replies are JSON: nothing that the child sends can run code here. The built-in templates need none of this.
"""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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

BATCH_CHARACTERS = 1 << 16
"""Text that is rendered at a time. With conversations of 1,700 characters on average `moba-data sft` runs at 0.91 of
its speed with the template in this process, and at 0.62 if each conversation is sent by itself."""
_OUT_OF_MEMORY = 3
"""Exit code of the child when its memory was not enough."""


class Limits(NamedTuple):
    """Limits on what a template does with one conversation."""

    seconds: int = 30
    """Processor time."""
    memory: int = 1 << 30
    """Bytes, beyond what the child needs without the template. Not enforced by the kernel of macOS."""
    text: int = 1 << 20
    """Bytes that the template may write in addition to `growth` times the conversation's."""
    growth: int = 16
    breaches: int = 5
    """Conversations that may exceed a limit before the template is given up."""


DEFAULT_LIMITS = Limits()


class ConfinedTemplate:
    """A `ChatTemplate` in a process of its own. Arguments, methods and errors are those of `ChatTemplate`.

    A conversation that exceeds one of `limits` raises ValueError; after `limits.breaches` of them, DataError.
    """

    def __init__(
        self, source: str, end_of_turn: str, variables: dict[str, str] | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.definition = TemplateDefinition(source, end_of_turn, variables or {})
        self._limits = limits
        self._setup = [source, end_of_turn, variables, limits.seconds, limits.memory]
        self._breaches = 0
        self._child: _Child | None = None
        try:
            self._send([])
            self._receive()
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
            return [result if error is None else ValueError(error) for result, error in self._receive()]
        except _BreachError as error:
            if len(calls) > 1:
                return [found for call in calls for found in self._results(self._send([call]))]
            self._breaches += 1
            if self._breaches >= self._limits.breaches:
                raise DataError(f"{error}, as in {self._breaches - 1} conversations before; give another") from None
            return [error]

    def _send(self, calls: list[Any]) -> list[Any]:
        """Send calls to the child, which is waiting for some, and start a child if there is none. Returns the calls."""
        if self._child is None:
            self._child = _Child()
            self._child.send(_encode(self._setup))
        self._child.send(_encode(calls))
        return calls

    def _receive(self) -> list[Any]:
        """Result and error of each of the calls that were sent. Raises ValueError when the template cannot be compiled,
        _BreachError when it has exceeded a limit."""
        assert self._child is not None
        limit = self._limits.text + self._limits.growth * self._child.asked
        try:
            # Only a child that is stopped or starved takes so much longer than its processor time.
            if not self._child.connection.poll(60 + 10 * self._limits.seconds):
                raise TimeoutError
            reply = json.loads(self._child.connection.recv_bytes(limit))
        except (EOFError, ConnectionError):
            problem = self._reason(self._child.process.wait())
        except TimeoutError:
            problem = "did not answer in time"
        except OSError:  # the reply is longer
            problem = f"writes more than {limit:,} bytes"
        else:
            if isinstance(reply, str):
                raise ValueError(reply)
            return list(reply)
        self._child = None
        raise _BreachError(f"the chat template {problem}")

    def _reason(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return f"takes more than {self._limits.seconds} s of processor time"
        if code == _OUT_OF_MEMORY:
            return f"takes more than {self._limits.memory >> 20:,} MiB of memory"
        return f"ended its process ({signal.strsignal(-code) if code < 0 else f'exit code {code}'})"


class _BreachError(ValueError):
    """A template exceeded a limit: its process has ended, or must be ended."""


class _Child:
    """A process that runs `serve`, killed when this object is deleted."""

    def __init__(self) -> None:
        self.asked = 0
        """Bytes of the request that was sent last."""
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = f"from {__name__} import serve; serve({descriptor})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", command],  # -P: the working folder, which may be from elsewhere, has no code
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        weakref.finalize(self, _end, self.process, self.connection)

    def send(self, request: bytes) -> None:
        self.asked = len(request)
        with contextlib.suppress(ConnectionError):  # the child has ended: reading its reply says why
            self.connection.send_bytes(request)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


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


def serve(descriptor: int) -> None:
    """The child: compile the template that comes first, then answer calls until the connection is closed."""
    connection = Connection(descriptor)
    try:
        source, end_of_turn, variables, seconds, memory = json.loads(connection.recv_bytes())
        _limit_memory(memory)
        _limit_time(seconds)
        try:
            template = ChatTemplate(source, end_of_turn, variables)
        except DataError as error:
            connection.send_bytes(_encode(str(error)))
            return
        while True:
            calls = json.loads(connection.recv_bytes())
            _limit_time(seconds)
            connection.send_bytes(_encode([_answer(template, *call) for call in calls]))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent has ended, or stops
        return


def _answer(template: ChatTemplate, method: str, *arguments: Any) -> tuple[Any, str | None]:
    """Result and error of a call."""
    try:
        if method == "split":
            return template.split(Conversation(*arguments[0])), None
        return template.render(*arguments), None
    except ValueError as error:
        return None, str(error)


def _encode(value: Any) -> bytes:
    # JSON texts may hold half a surrogate pair, which plain UTF-8 refuses.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _limit_memory(extra: int) -> None:
    """Limit the address space to what is in use and `extra` bytes."""
    used = 0
    with contextlib.suppress(OSError):  # no /proc: macOS
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
    # A process that the kernel ends would leave a file of its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: int) -> None:
    """Have the kernel end this process (SIGXCPU) after `seconds` more of processor time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # The kernel counts from the process's start, so the limit moves along with each batch of calls.
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
