"""The recipe selects the sinks."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from moba_train import __version__, environment
from moba_train.config.schema import RunConfig
from moba_train.telemetry.sinks import make_telemetry
from moba_train.telemetry.telemetry import SinkRun

RECIPE = {
    "name": "run",
    "run_dir": "unused",
    "model": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
    },
    "data": {"train": [{"path": "corpus"}]},
    "batch_tokens": 4096,
    "stages": [{"name": "short", "seq_len": 4096, "tokens": 1000000}],
}


@pytest.mark.parametrize(
    ("section", "console", "files"),
    [
        ({"console": False, "report": False}, False, {"metrics.jsonl"}),
        ({"report": False}, True, {"metrics.jsonl"}),
    ],
)
def test_the_sinks_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: dict[str, Any], console: bool, files: set[str]
) -> None:
    assert files_of_sinks(tmp_path, section) == files
    assert ("loss 3.5000" in capsys.readouterr().out) == console


def files_of_sinks(tmp_path: Path, section: dict[str, Any]) -> set[str]:
    """Files and folders in the run's folder once the sinks of this section have had a record."""
    run_dir: Path = tmp_path / "run"
    config = RunConfig.model_validate(RECIPE | {"telemetry": section})
    telemetry = make_telemetry(config.telemetry, SinkRun(run_dir, "run", "run-id", None, 100, {}))
    telemetry.log(1, 4096, {"loss": 3.5})
    telemetry.close()
    return {path.name for path in run_dir.iterdir()}


def test_the_code_is_named_by_its_commit_or_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True, capture_output=True)

    source = tmp_path / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path)
    look = environment.code_version.__wrapped__
    git("init")
    assert look() == {"version": __version__}, "there is a repository, but it does not hold the package"
    (tmp_path / "COMMIT").write_text(f"{'0f' * 20}-dirty\n")
    assert look() == {"version": __version__, "commit": "0f" * 20, "dirty": True}, "as a wheel notes it"
    git("add", "__init__.py")
    git("commit", "-m", "first")
    assert look().keys() == {"version", "commit", "dirty"}
    assert not look()["dirty"]
    source.write_text("changed = True\n")
    assert look()["dirty"]
