"""Work on data from elsewhere, in a process of its own with limits on processor time and memory.

A library that is safe with honest data may loop for ever, fill the memory or end its process with forged data. So the
work is done in a child process, whose limits the kernel enforces whatever the data are. Once a limit is exceeded the
child has ended, and another one is started for the next request.

Requests and replies are a line of JSON and bytes: nothing that the child sends can run code here. The work is a module
with a function `made(setup, content)`, which returns the function that answers requests: both get a JSON value and
bytes; the answer is also such a pair. Their ValueErrors and DataErrors are raised here, as ValueErrors.
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
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from moba_train.errors import DataError

_OUT_OF_MEMORY = 3
"""Exit code of the child when its memory was not enough."""


class WorkLimits(NamedTuple):
    """Limits on what a child does with one request."""

    seconds: int
    """Processor time."""
    memory: int
    """Bytes, beyond what the child needs before it has seen any data. Not enforced by the kernel of macOS."""
    reply: int
    """Bytes of the answer, in addition to `growth` times the request's."""
    growth: int


class BreachError(ValueError):
    """The work has exceeded a limit: its process has ended, or must be ended."""


class ConfinedProcess:
    """The work of `module` on one setup, such as a template or a tokenizer. `what` names it in errors."""

    def __init__(self, module: str, what: str, setup: Any, content: bytes, limits: WorkLimits) -> None:
        self._module = module
        self._what = what
        self._setup = _pack([limits.seconds, limits.memory, setup], content)
        self._limits = limits
        self._most = 0
        """Bytes that the answer to the request that was sent may have."""
        self._child: _Child | None = None

    def call(self, request: Any, content: bytes, limits: WorkLimits) -> tuple[Any, memoryview]:
        """The answer to a request. Raises as `receive`."""
        self.send(request, content, limits)
        return self.receive()

    def send(self, request: Any, content: bytes, limits: WorkLimits) -> None:
        """Send a request to the child, which is waiting for one, and start a child if there is none."""
        self._limits = limits
        if self._child is None:
            self._child = _Child(self._module)
            self._child.send(self._setup)
        message = _pack([limits.seconds, limits.memory, request], content)
        self._most = limits.reply + limits.growth * len(message)
        self._child.send(message)

    def receive(self) -> tuple[Any, memoryview]:
        """The answer to the request that was sent. Raises ValueError when setup or request cannot be used, BreachError
        when a limit was exceeded."""
        assert self._child is not None
        try:
            # Only a child that is stopped or starved takes so much longer than its processor time.
            if not self._child.connection.poll(60 + 10 * self._limits.seconds):
                raise TimeoutError
            (answer, error), content = _unpack(self._child.connection.recv_bytes(self._most))
        except (EOFError, ConnectionError):
            problem = self._reason(self._child.process.wait())
        except TimeoutError:
            problem = "did not answer in time"
        except OSError:  # the reply is longer
            problem = f"writes more than {self._most:,} bytes"
        else:
            if error is not None:
                raise ValueError(error)
            return answer, content
        self._child = None
        raise BreachError(f"{self._what} {problem}")

    def _reason(self, code: int) -> str:
        memory = f"{self._limits.memory >> 20:,} MiB of memory"
        if code == -signal.SIGXCPU:
            return f"takes more than {self._limits.seconds} s of processor time"
        if code == _OUT_OF_MEMORY:
            return f"takes more than {memory}"
        if code == -signal.SIGABRT:  # how libraries in Rust and C++ end that get no memory
            return f"ended its process (Aborted), as libraries do that need more than {memory}"
        return f"ended its process ({signal.strsignal(-code) if code < 0 else f'exit code {code}'})"


class _Child:
    """A process that runs `serve`, killed when this object is deleted."""

    def __init__(self, module: str) -> None:
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = f"from {__name__} import serve; serve({descriptor}, {module!r})"
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
        with contextlib.suppress(ConnectionError):  # the child has ended: reading its reply says why
            self.connection.send_bytes(request)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(descriptor: int, module: str) -> None:
    """The child: set up the work of `module`, then answer requests until the connection is closed."""
    connection = Connection(descriptor)
    try:
        made = import_module(module).made
        before = _address_space()
        # A process that the kernel ends would leave a file of its memory.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer = None
        while True:
            (seconds, memory, request), content = _unpack(connection.recv_bytes())
            with contextlib.suppress(OSError, ValueError):  # macOS
                _limit(resource.RLIMIT_AS, before + memory)
            # SIGXCPU. The kernel counts from the process's start, so the limit moves along with each request.
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
            try:
                if answer is None:
                    answer = made(request, content)
                    continue
                reply, content = answer(request, content)
            except (DataError, ValueError) as error:
                connection.send_bytes(_pack([None, str(error)]))
                if answer is None:
                    return
            else:
                connection.send_bytes(_pack([reply, None], content))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent has ended, or stops
        return


def _pack(value: Any, content: bytes | memoryview = b"") -> bytes:
    # JSON texts may hold half a surrogate pair, which plain UTF-8 refuses.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n" + content


def _unpack(message: bytes) -> tuple[Any, memoryview]:
    end = message.index(b"\n")  # JSON has none inside
    return json.loads(message[:end].decode("utf-8", "surrogatepass")), memoryview(message)[end + 1 :]


def _address_space() -> int:
    """Bytes of address space in use."""
    with contextlib.suppress(OSError):  # no /proc: macOS
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def _limit(limited: int, value: int) -> None:
    _, hard = resource.getrlimit(limited)
    resource.setrlimit(limited, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
