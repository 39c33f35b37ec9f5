"""Arms that share a GPU find CUDA's Multi-Process Service, which ends with the call."""

import os
from pathlib import Path

import pytest

from experiments.multi_process import multi_process_service

PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the service's control program, which writes down its arguments, its input and its folder."""
    log = tmp_path / "calls"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        '#!/bin/sh\n[ -n "$1" ] || read command\n'
        f'echo "$1$command" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_VISIBLE_DEVICES" >> {log}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/logs")
    return log


def test_the_service_runs_while_arms_do(calls: Path) -> None:
    folder = ""

    def arms() -> None:
        nonlocal folder
        with multi_process_service():
            folder = os.environ[PIPES]
            assert calls.read_text().split() == ["-d", folder]
            assert Path(folder).is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arms()
    assert calls.read_text().split() == ["-d", folder, "quit", folder, "2,3"]
    assert PIPES not in os.environ
    assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == "/logs"
    assert not Path(folder).exists()


def test_a_service_of_the_users_is_left_alone(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPES, "/somewhere")
    with multi_process_service():
        assert os.environ[PIPES] == "/somewhere"
    assert not calls.exists()


def test_without_the_service_arms_take_turns(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (calls.parent / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no GPU >&2\nexit 1\n")
    with multi_process_service():
        assert PIPES not in os.environ
    assert "nvidia-cuda-mps-control -d failed: no GPU" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/nowhere")
    with multi_process_service():
        assert PIPES not in os.environ
