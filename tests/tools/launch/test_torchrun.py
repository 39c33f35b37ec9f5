"""The launcher ends with the code that its ranks end with, whatever signal comes, and counts nothing that an earlier
start of the ranks has left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moba_train.checkpoint.manifest import read_meta
from moba_train.run.stop import STOPPED_CODE
from moba_train.tools import cli
from moba_train.tools.cli import app
from moba_train.tools.launch.torchrun import SHUTDOWN_TIMEOUT
from moba_train.tools.launch.torchrun import main as launch
from tests.forked_program import ForkedProgram
from tests.noting import noting
from tests.run.test_stop import after_the_start
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import free_port

RANK = """
import os, sys, time
from moba_train.run import stop
stop.JOINS_WITHIN_S = 0.5
request = stop.listen()
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank_0 = os.environ["RANK"] == "0"
def wait():
    print("waiting", flush=True)
    assert request.wait(60)
{}
"""
"""A rank that does what a rank that trains does, as far as the launcher sees it."""

STOPS = "request.joined(); wait(); stop.report_stopped()"


def launch_command(folder: Path, program: str, *options: str) -> list[str]:
    """Arguments of Python for a launcher whose two ranks run this program."""
    (folder / "rank.py").write_text(RANK.format(program))
    ranks = ["--standalone", "--nproc-per-node", "2"]
    return ["-m", "moba_train.tools.launch.torchrun", *ranks, *options, str(folder / "rank.py")]


def wait_for_ranks(process: ForkedProgram | subprocess.Popen[bytes], log: Path, ranks: int = 2) -> None:
    """Wait until this number of ranks wait for a signal."""
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count("waiting") < ranks:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(
    folder: Path, program: str, *options: str, number: signal.Signals | None = None, **more: str
) -> tuple[int | None, str]:
    """Exit code and output of a launcher that gets a signal, or none, while its ranks wait for one. The code of a run
    that stopped as asked is 143."""
    process = ForkedProgram(
        launch_command(folder, program, *options), folder / "output", **{STOPPED_CODE: "143", **more}
    )
    if number is not None:
        wait_for_ranks(process, folder / "output")
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (STOPS, 143),
        ("request.joined(); wait()", 0),
        ("request.joined(); wait(); sys.exit(2 if rank_0 else 0)", 2),
        ("request.joined(); wait(); sys.exit(2 if rank_0 else 75)", 75),
        ("request.joined(); wait(); sys.exit(2 if rank_0 else 1)", 1),
        ("request.joined(); wait(); os.kill(os.getpid(), 9) if rank_0 else sys.exit(2)", 128 + signal.SIGKILL),
    ],
    ids=["stopped as asked", "complete", "save failed", "broken node", "bug", "out of memory"],
)
def test_after_a_signal_the_code_is_that_of_the_ranks(program: str, code: int, tmp_path: Path) -> None:
    found, output = ended(tmp_path, program, number=signal.SIGTERM)
    assert found == code, output
    assert "not stopped in time" not in output
    assert ("was killed by SIGKILL" in output) == (code == 128 + signal.SIGKILL)
    assert "Traceback" not in output


def test_ranks_that_do_not_stop_in_time_are_named_and_the_code_is_that_of_the_signal(tmp_path: Path) -> None:
    program = "request.joined(); wait(); time.sleep(0 if rank_0 else 60)"
    code, output = ended(tmp_path, program, number=signal.SIGTERM, **{SHUTDOWN_TIMEOUT: "1"})
    assert code == 128 + signal.SIGTERM, output
    assert "error: not stopped in time after SIGTERM, and killed: rank 1\n" in output


def test_a_node_that_is_stopped_alone_keeps_no_launcher_waiting(tmp_path: Path) -> None:
    """The ranks of the other node end by the same step; torchrun alone would wait 300 s there."""
    program = (
        f"from pathlib import Path; ended = Path({str(tmp_path / 'ended')!r}); request.joined()\n"
        "if rank_0: print('waiting', flush=True)\n"
        "while rank_0 and not ended.exists(): time.sleep(0.05)\n"
        "if not rank_0: wait(); ended.touch()\n"
        "stop.report_stopped()"
    )
    command = launch_command(tmp_path, program)
    places = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(free_port())]
    nodes = []
    for number in (0, 1):
        (folder := tmp_path / str(number)).mkdir()
        options = [*command[:2], *places, "--node-rank", str(number), command[-1]]
        nodes.append(ForkedProgram(options, folder / "output", **{STOPPED_CODE: "143"}))
    for number, node in enumerate(nodes):
        wait_for_ranks(node, tmp_path / str(number) / "output", 1)
    nodes[1].send_signal(signal.SIGTERM)
    for node in nodes:
        output, _ = node.communicate(timeout=60)
        assert node.returncode == 143, output
        assert "rror" not in output


def test_a_launcher_that_no_longer_waits_for_the_others_says_nothing(tmp_path: Path) -> None:
    """Not a traceback of torchrun's, though their ranks take longer, as rank 0 does that waits for wandb."""
    program = "request.joined()\nprint('waiting', flush=True)\nwait()\nstop.report_stopped()"
    command = launch_command(tmp_path, program)
    (impatient := tmp_path / "impatient.py").write_text(
        "import sys\nfrom moba_train.tools.launch import torchrun\n"
        "torchrun.TOGETHER_S = 0.5\nsys.exit(torchrun.main(sys.argv[1:]))\n"
    )
    places = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(free_port())]
    nodes = []
    for number in (0, 1):
        (folder := tmp_path / str(number)).mkdir()
        options = [str(impatient), *places, "--node-rank", str(number), command[-1]]
        nodes.append(ForkedProgram(options, folder / "output"))
    for number, node in enumerate(nodes):
        wait_for_ranks(node, tmp_path / str(number) / "output", 1)
    for node in reversed(nodes):
        node.send_signal(signal.SIGTERM)
        output, _ = node.communicate(timeout=60)
        assert node.returncode == 0, output
        assert "rror" not in output


@pytest.mark.parametrize("joined", ["", "request.joined();"], ids=["waits to join", "joined"])
def test_a_rank_that_fails_asks_the_others_for_nothing_and_leaves_nothing_for_the_next_start(
    joined: str, tmp_path: Path
) -> None:
    """The first start leaves a file of a stop, as where a signal reached one rank only, and then fails."""
    program = (
        f"{joined}\n"
        "if first_start and rank_0: stop.report_stopped(); print('here', flush=True); time.sleep(1.5)\n"
        "elif first_start: time.sleep(0.5); os.kill(os.getpid(), 9)\n"
        "assert not request.requested"
    )
    code, output = ended(tmp_path, program, "--max-restarts", "1")
    assert code == 0, output
    assert "topp" not in output, output


@pytest.mark.parametrize("nohup", [[], ["nohup"]], ids=["", "nohup"])
def test_a_terminal_that_closes_asks_for_a_stop_except_under_nohup(nohup: list[str], tmp_path: Path) -> None:
    command = launch_command(tmp_path, "print('process', os.getpid(), flush=True);" + STOPS)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", STOPPED_CODE: "143"}
    log = tmp_path / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*nohup, sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
        )
    wait_for_ranks(process, log)
    for pid in (process.pid, *map(int, re.findall("process ([0-9]+)", log.read_text()))):
        os.kill(pid, signal.SIGHUP)
    if nohup:
        time.sleep(0.5)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()


def test_the_launcher_ends_with_the_code_of_the_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun alone would end with 1. A signal counts as in a shell. torchrun's report is printed where no rank has
    said why it ended."""
    program = tmp_path / "rank.py"
    program.write_text("import os, sys\nif os.environ['RANK'] == '0':\n    exec(sys.argv[1])\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.05", str(program)]
    for body, code in (("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)):
        assert launch([*options, body]) == code
        printed = capfd.readouterr().err
        assert ("exitcode  : -9" in printed) == (code == 137), printed
        assert ("error: rank 0 was killed by SIGKILL" in printed) == (code == 137), printed
        assert code == 137 or not printed


def test_moba_train_goes_through_the_launcher(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("moba_train.tools.launch.torchrun.main", noting(given.extend, lambda _: 75))
    assert CliRunner().invoke(app, ["train", str(run.write_recipe()), "--gpus", "2"]).exit_code == 75
    assert given[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert given[-3:-1] == ["-m", "moba_train.train"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "error"),
    [
        (2, 99, "error: --gpus (--nproc-per-node, GPUS): given 99; allowed: 1 to 2, the GPUs of this machine\n"),
        (0, 99, "given 99; allowed: 1 to 8, as no GPU is visible: 8, or one for each core\n"),
        (0, 8, ""),
        (2, 2, ""),
    ],
)
def test_more_ranks_than_the_machine_takes_are_refused_before_any_starts(
    gpus: int, ranks: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.run.main", started.extend)
    done = CliRunner().invoke(app, ["train", "recipe.yaml", "--gpus", str(ranks)])
    assert done.exit_code == (2 if error else 0)
    assert done.output.endswith(error)
    assert bool(started) is not bool(error)


def test_on_several_nodes_too_many_ranks_are_left_to_the_ranks_which_tell_the_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher that did not start would keep the others waiting for 900 s."""
    started: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.run.main", started.extend)
    place = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port", str(free_port())]
    assert launch([*place, "--nproc-per-node", "8", "-m", "moba_train.train", "recipe.yaml"]) == 0
    assert started


def test_an_error_ends_the_whole_launch_and_its_output(run: Run) -> None:
    """Said once, though both ranks find it and restarts are allowed; torchrun adds nothing."""
    train = ["-m", "moba_train.tools.cli", "train", str(run.write_recipe())]
    command = [*train, "--gpus", "2", "--restarts", "3", "seed=-1"]
    launcher = ForkedProgram(command, run.folder / "output")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert output.splitlines() == [
        "error: 1 problem in the configuration:",
        "  - seed: given -1; allowed: integer >= 0 and < 2147483648",
    ]


def test_the_command_passes_the_flag_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before or after the overrides."""
    commands: list[list[str]] = []
    monkeypatch.setattr("moba_train.tools.launch.torchrun.main", noting(commands.append, lambda _: 0))
    recipe = tmp_path / "recipe.yaml"
    for arguments in (["seed=4", "--from-scratch"], ["--from-scratch", "seed=4"], ["seed=4"]):
        assert CliRunner().invoke(cli.app, ["train", str(recipe), *arguments, "--gpus", "1"]).exit_code == 0
    assert [command[-3:] for command in commands] == [
        [str(recipe), "seed=4", "--from-scratch"],
        [str(recipe), "seed=4", "--from-scratch"],
        ["moba_train.train", str(recipe), "seed=4"],
    ]


def test_moba_train_stops_at_a_step_and_goes_on_bit_for_bit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command, with torchrun replaced by a call."""

    def train(arguments: list[str]) -> int:
        return run.train_here(*arguments[arguments.index("moba_train.train") + 2 :])

    monkeypatch.setattr("moba_train.tools.launch.torchrun.main", train)
    command = ["train", str(run.write_recipe()), "--gpus", "1"]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    undisturbed = run.run_dir.rename(run.folder / "undisturbed")
    assert CliRunner().invoke(cli.app, [*command, "--stop-at-step", "7"]).exit_code == 0
    assert len(run.losses()) == 7
    assert run.newest_checkpoint.name == "step_00000007"
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert_same_tensors(run.newest_checkpoint, undisturbed / "checkpoints" / run.newest_checkpoint.name)


@pytest.mark.slow
def test_the_command_ends_with_code_0_when_its_ranks_stop_in_order(run: Run) -> None:
    run.recipe["stages"][1]["tokens"] = "10M"
    command = ["-m", "moba_train.tools.cli", "train", str(run.write_recipe()), "--gpus", "2"]
    process = ForkedProgram(command, run.folder / "output")
    log = run.run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and run.records()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert read_meta(run.newest_checkpoint)["progress"]["step"] == run.records()[-1]["step"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_while_torch_is_imported_ends_the_command_at_once(run: Run) -> None:
    command = ["moba_train.tools.cli", "train", str(run.write_recipe())]
    assert after_the_start(0.0, signal.SIGINT, command) == (143, "[rank 0] stopped before training began\n")
    assert not run.run_dir.exists()
