"""A run whose nodes cannot meet says so at once: a port in use, and by whom, or a host name without an address."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.errors import LaunchError
from moba_train.tools.launch import meeting_point
from moba_train.tools.launch.meeting_point import check_meeting_point
from tests.forked_program import ForkedProgram
from tests.tools.launch.test_torchrun import launch_command


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port at which this process listens."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip(f"no {request.param} here")
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_port_in_use_is_named_with_the_process_that_holds_it(taken: int) -> None:
    with pytest.raises(LaunchError, match=rf"--master-port: given {taken}, which is used by process {os.getpid()} \("):
        check_meeting_point("localhost", taken, is_first=True)
    check_meeting_point("localhost", taken, is_first=False)


def test_a_port_that_an_ended_run_has_used_is_free() -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        client.connect(("127.0.0.1", port))
        listener.accept()[0].close()  # first, so that its end lingers
    check_meeting_point("127.0.0.1", port, is_first=True)


def test_a_host_without_an_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([socket.EAI_AGAIN, socket.EAI_NONAME])

    def getaddrinfo(*_: object) -> None:
        number = next(failures)
        raise socket.gaierror(number, "as resolvers say it")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LaunchError, match=r"--master-addr: given 'node0', .* no address .*\(as resolvers say it\)"):
        check_meeting_point("node0", 29500, is_first=False)
    assert capsys.readouterr().err == "--master-addr: 'node0' has no address yet; asking for 10 s\n"


def test_a_pod_waits_until_the_first_one_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def getaddrinfo(host: str, _: None) -> None:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "not yet")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(meeting_point.time, "sleep", lambda _: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    check_meeting_point("pod-0", 29500, is_first=False)
    assert len(asked) == 3


def started(folder: Path, *options: str) -> tuple[int | None, str]:
    """Exit code and output of a launcher."""
    command = launch_command(folder, "print('ran')")
    command[command.index("--standalone")] = "--nnodes=1"
    program = ForkedProgram([*command[:-1], *options, command[-1]], folder / "output")
    output, _ = program.communicate(timeout=60)
    return program.returncode, output


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("taken", ["127.0.0.1"], indirect=True)
def test_the_launcher_ends_with_one_line(taken: int, tmp_path: Path) -> None:
    code, output = started(tmp_path, "--master-addr", "localhost", "--master-port", str(taken))
    assert code == 2, output
    assert output.startswith(f"error: --master-port: given {taken}, which is used by process {os.getpid()} (")
    assert output.count("\n") == 1
    assert started(tmp_path)[0] == 0, "finds a port itself"


@pytest.mark.parametrize("taken", ["127.0.0.1"], indirect=True)
def test_a_rank_that_another_launcher_has_started_ends_with_one_line(taken: int, tmp_path: Path) -> None:
    """As by srun or mpirun: rank 0 opens the port itself."""
    (tmp_path / "rank.py").write_text(
        "from datetime import timedelta\n"
        "from moba_train.errors import UserError, print_error\n"
        "from moba_train.parallel.world import joined_world\n"
        "try:\n"
        "    with joined_world(timedelta(seconds=5)): pass\n"
        "except UserError as error:\n"
        "    print_error(error)\n"
    )
    places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(taken)}
    output, _ = ForkedProgram([str(tmp_path / "rank.py")], tmp_path / "output", **places).communicate(timeout=60)
    assert f"error: MASTER_ADDR=localhost, MASTER_PORT={taken}: the ranks cannot meet there (" in output
    assert "Traceback" not in output
