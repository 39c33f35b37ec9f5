"""A rank that stalls or dies ends the run, soon, and the message says which one it was."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_run import Run

TIMEOUT_S = 5


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that torchrun started and that still run, by rank."""
    found = {}
    with suppress(ProcessLookupError, FileNotFoundError):  # torchrun itself has ended
        for child in map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()):
            with suppress(ProcessLookupError, FileNotFoundError):  # ended since it was listed
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found |= {int(item[5:]): child for item in environment if item.startswith(b"RANK=")}
    return found


def disturb(run: Run, what: signal.Signals) -> tuple[int, str, float]:
    """Send `what` to rank 1 of two that share a sequence: exit code, output, seconds until the end."""
    run.recipe["stages"][1]["tokens"] = "10M"
    run.recipe["parallel"] = {"cp": 2, "cp_transport": "ring", "timeout": TIMEOUT_S}
    launcher = run.start(2)
    try:
        deadline = time.monotonic() + 90
        while not (path := run.run_dir / "metrics.jsonl").exists() or len(path.read_text().splitlines()) < 12:
            assert time.monotonic() < deadline, "no training in 90 s"
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.1)
        victim = ranks_of(launcher)[1]
        began = time.monotonic()
        os.kill(victim, what)
        waiting = ranks_of(launcher).get(0)
        while waiting is not None and _runs(waiting):
            assert time.monotonic() - began < 60, "rank 0 waits on"
            time.sleep(0.1)
        taken = time.monotonic() - began
        if what == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    return launcher.returncode, output, taken


def _runs(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_the_rank_that_stalls_or_dies_is_named(run: Run, what: signal.Signals) -> None:
    code, output, taken = disturb(run, what)
    assert code != 0
    assert taken < TIMEOUT_S + 20
    if what == signal.SIGSTOP:
        assert "no answer from rank 1" in output, output[-3000:]
        assert "rank 0 gave up" in output, output[-3000:]
        assert "in step" in output, output[-3000:]
    else:
        assert "rank: 1" in output or "rank      : 1" in output, output[-3000:]  # torchrun's report
