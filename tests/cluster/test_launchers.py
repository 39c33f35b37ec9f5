"""The launchers answer `--help` and refuse wrong arguments before they install or prepare anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launched(folder: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The launcher as a user starts it from `folder`, where it would make a virtual environment."""
    given = {"PATH": os.environ["PATH"], "MOBA_VENV": str(folder / "venv"), **variables}
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=60)
    assert not (folder / "venv").exists()
    return done


@pytest.mark.parametrize("name", ["quickstart.sh", "miniature.sh", "multinode.sh", "smollm2.sh"])
def test_help_is_the_comment_at_the_top(tmp_path: Path, name: str) -> None:
    done = launched(tmp_path, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bash launch/{name}" in done.stdout
    assert "#" not in done.stdout
    assert "usage.sh" not in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "error"),
    [
        ("quickstart.sh", ["--corpse", "x"], {}, "unknown argument --corpse; allowed: --corpus FILE_OR_FOLDER"),
        ("quickstart.sh", ["--corpus"], {}, "--corpus needs a file or folder"),
        ("quickstart.sh", ["--corpus", "absent"], {}, "--corpus: absent does not exist"),
        ("miniature.sh", [], {}, "no miniature ''; allowed: 128k-from-scratch"),
        ("miniature.sh", ["sft-1m", "--corpus", "absent"], {}, "--corpus: absent does not exist"),
        ("multinode.sh", [], {}, "no recipe; usage: NODES=N NODE_RANK=I MASTER=HOST"),
        ("multinode.sh", ["a.yaml"], {"NODES": "two"}, "NODES: given 'two'; allowed: a whole number"),
        ("multinode.sh", ["a.yaml"], {"NODE_RANK": "1"}, "NODE_RANK: given 1; allowed: 0 to NODES - 1, which is 0"),
        ("smollm2.sh", ["tune"], {}, "given 'tune'; allowed: prepare, train, finish, retrieval, signal, gates"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, name: str, arguments: list[str], variables, error: str) -> None:
    done = launched(tmp_path, name, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {error}")


def test_a_miniature_refuses_a_wrong_override_before_it_prepares_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("nothing to read")
    arguments = ["sft-1m", "--corpus", "text.txt", "optim.lr=fast"]
    done = launched(tmp_path, "miniature.sh", *arguments, MOBA_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (2, "")
    assert "optim.lr: given 'fast'; allowed: number > 0" in done.stderr
