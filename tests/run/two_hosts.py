"""Two hosts on this machine: network namespaces with addresses, host names and one cable, for those who are root."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class TwoHosts:
    """Two hosts, node0 and node1, that share the file system. Raises OSError or CalledProcessError in `plug_in` where
    there are no namespaces."""

    def __init__(self) -> None:
        self.names = [f"moba{os.getpid()}-{number}" for number in (0, 1)]

    def plug_in(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        ends = [f"mt{os.getpid()}{letter}" for letter in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", name, "link", "set", device, "up")
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` puts it in the place of /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n10.213.77.1 node0\n10.213.77.2 node1\n")

    def unplug(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError, OSError):
                _ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on that host."""
        as_host = f'hostname node{number} && exec "$@"'
        return ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "bash", "-c", as_host, "host", *command]

    def processes(self, number: int) -> list[int]:
        """Process ids on that host."""
        return list(map(int, _ip("netns", "pids", self.names[number]).split()))


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
