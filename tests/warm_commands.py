"""`moba-train` and `moba-data` as forks of one process that has imported them: importing takes a command longer than
most of what tests have it do.

`serve` is called in a fork of the process that has imported them, which answers until it is killed.
`python -SE warm_commands.py SOCKET NAME ARGUMENT...` asks for a command in its own folder, with its own environment and
files.

Training is on one rank.
"""

import gc
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable


def serve(address: str) -> None:
    """Fork a command for each connection."""
    import data_tools.cli
    import moba_train.attention.moba
    import moba_train.tools.cli
    import moba_train.tools.convert.hf  # what the commands import late
    import moba_train.tools.plan.plan
    import moba_train.train

    gc.freeze()

    def train() -> None:
        """On one rank; torchrun would import all this again, twice."""
        given = re.sub(r"--gpus \d+", "", shlex.join(sys.argv[2:]))
        sys.exit(moba_train.train.main(shlex.split(given)))

    programs: dict[str, Callable[[], object]] = {
        "moba-train": moba_train.tools.cli.app,
        "moba-train train": train,
        "moba-data": data_tools.cli.app,
    }
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        os.rename(f"{address}.new", address)  # where it is, it answers
        while True:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(connection, programs)
            connection.close()


def answer(connection: socket.socket, programs: dict[str, Callable[[], object]]) -> None:
    """Run the command in a fork of this process, which sends its exit code and ends."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while more := connection.recv(1 << 16):
        text += more
    command, folder, environment = json.loads(text)
    process = os.fork()
    if process:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        connection.sendall(str(code).encode())
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    programs.get(" ".join(command[:2]), programs[command[0]])()
    sys.exit()


def ask(address: str, command: list[str]) -> int:
    """Have a command run, and wait for its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        text = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [text[:1000]], [0, 1, 2])
        connection.sendall(text[1000:])
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
