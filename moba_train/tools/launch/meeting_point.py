"""The address at which the launchers of a run's nodes meet, looked at before torchrun waits for it in silence or ends
in a traceback."""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moba_train.errors import LaunchError

DNS_ANSWERS_WITHIN_S = 10.0
"""Seconds that a name service which fails is asked again."""

POD_STARTS_WITHIN_S = 600.0
"""Seconds until the first node must have an address in Kubernetes, where it has none before its image is pulled;
torchrun waits as long for its launcher."""

_LISTENS = "0A"
"""State of a socket that listens in /proc/net/tcp, as `TCP_LISTEN` of Linux's include/net/tcp_states.h."""


def check_meeting_point(host: str, port: int, is_first: bool) -> None:
    """Raises LaunchError when `host`, `--master-addr`, has no address, or a process of this machine, the first node,
    listens at `port`, `--master-port`."""
    _wait_for_address(host)
    if not is_first:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger on the port of a run
        try:
            probe.bind(("", port))
        except OSError as error:
            used = f"used by {_listener(port)}" if error.errno == errno.EADDRINUSE else f"refused ({error.strerror})"
            raise LaunchError(
                f"--master-port: given {port}, which is {used} on this machine; allowed: a free port, the same on all "
                "nodes (PORT of launch/multinode.sh)"
            ) from None


def _wait_for_address(host: str) -> None:
    begin = time.monotonic()
    said = False
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            limit = DNS_ANSWERS_WITHIN_S if getattr(error, "errno", None) == socket.EAI_AGAIN else 0.0
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                limit = POD_STARTS_WITHIN_S
            if time.monotonic() - begin >= limit:
                raise LaunchError(
                    f"--master-addr: given {host!r}, which has no address on this machine ({error.strerror}); allowed: "
                    "a host name or IP address of the first node (MASTER of launch/multinode.sh)"
                ) from None
            if not said:
                print(f"--master-addr: {host!r} has no address yet; asking for {limit:g} s", file=sys.stderr)
                said = True
            time.sleep(0.5)
        else:
            return


def _listener(port: int) -> str:
    """The process that listens at `port`, with its command if this user may see it."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:200]!a})"
    return "another process"


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen at `port`; none where the system does not tell."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
