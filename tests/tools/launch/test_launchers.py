"""The launchers answer `--help` and refuse wrong arguments before they install or prepare anything."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def launched(folder: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The launcher as a user starts it from `folder`, where it would make a virtual environment."""
    given = {"PATH": os.environ["PATH"], "MOBA_VENV": str(folder / "venv"), **variables}
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=60)
    assert not (folder / "venv").exists()
    return done


@pytest.mark.parametrize(
    "name", ["quickstart.sh", "miniature.sh", "multinode.sh", "slurm.sbatch", "smollm2.sh", "test.sh"]
)
def test_help_is_the_comment_at_the_top(tmp_path: Path, name: str) -> None:
    done = launched(tmp_path, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"launch/{name}" in done.stdout
    assert "#" not in done.stdout
    assert "usage.sh" not in done.stdout


def test_help_of_the_job_script_is_found_from_another_folder() -> None:
    """The script goes to the repository's folder first, where its own path may lead elsewhere."""
    command = ["bash", "../launch/slurm.sbatch", "--help"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "launch/slurm.sbatch" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "error"),
    [
        ("quickstart.sh", ["--corpse", "x"], {}, "unknown argument --corpse; allowed: --corpus FILE_OR_FOLDER"),
        ("quickstart.sh", ["--corpus"], {}, "--corpus needs a file or folder"),
        ("quickstart.sh", ["--corpus", "absent"], {}, "--corpus: absent does not exist"),
        ("miniature.sh", [], {}, "no miniature ''; allowed: 128k-from-scratch"),
        ("miniature.sh", ["../quickstart"], {}, "no miniature '../quickstart'; allowed: 128k-from-scratch"),
        ("miniature.sh", ["sft-1m", "--corpus", "absent"], {}, "--corpus: absent does not exist"),
        ("multinode.sh", [], {}, "no recipe; usage: NODES=N NODE_RANK=I MASTER=HOST"),
        ("multinode.sh", ["a.yaml"], {"NODES": "two"}, "NODES: given 'two'; allowed: a whole number"),
        (
            "multinode.sh",
            ["a.yaml"],
            {"NODES": "9" * 20},
            "NODES: given '99999999999999999999'; allowed: a whole number",
        ),
        ("multinode.sh", ["a.yaml"], {"NODES": "0"}, "NODES: given 0; allowed: 1 or more"),
        ("multinode.sh", ["a.yaml"], {"NODES": "08", "NODE_RANK": "09"}, "NODE_RANK: given 9; allowed: 0 to NODES - 1"),
        ("multinode.sh", ["a.yaml"], {"NODES": "2"}, "MASTER: not given; allowed: the host name of node 0"),
        ("multinode.sh", ["a.yaml"], {"NODES": "2", "MASTER": "a b"}, "MASTER: given 'a b'; allowed: a host name or"),
        ("multinode.sh", ["a.yaml"], {"PORT": "70000"}, "PORT: given 70000; allowed: 1 to 65535"),
        ("multinode.sh", ["a.yaml"], {"GPUS": "0"}, "GPUS: given 0; allowed: 1 or more"),
        ("multinode.sh", ["a.yaml"], {}, "RECIPE: a.yaml is neither in "),
        ("slurm.sbatch", ["a.yaml"], {}, "not in a job of Slurm; usage: sbatch --nodes N"),
        ("slurm.sbatch", [], {"SLURM_JOB_ID": "1"}, "no recipe; usage: sbatch --nodes N"),
        ("multinode.sh", ["quickstart"], {"MOBA_PYTHON": "/none/python"}, "MOBA_PYTHON: given '/none/python'"),
        ("slurm.sbatch", ["a.yaml"], {"SLURM_JOB_ID": "1"}, "RECIPE: a.yaml is not in "),
        ("slurm.sbatch", ["quickstart"], {"SLURM_JOB_ID": "1", "REQUEUES": "some"}, "REQUEUES: given 'some'"),
        (
            "slurm.sbatch",
            ["README.md"],
            {"SLURM_JOB_ID": "1", "REQUEUES": "some"},
            "REQUEUES: given 'some'; allowed: a whole",
        ),
        ("smollm2.sh", ["train", "optim.lr=1"], {}, "given 'optim.lr=1' after train; allowed: nothing more"),
        (
            "multinode.sh",
            ["README.md"],
            {"MOBA_PYTHON": "/none/python"},
            "MOBA_PYTHON: given '/none/python'; allowed: a",
        ),
        (
            "multinode.sh",
            ["README.md"],
            {"MOBA_PYTHON": "./bare"},
            "MOBA_PYTHON: given './bare', which lacks torch numpy",
        ),
        (
            "multinode.sh",
            ["README.md"],
            {"MOBA_PYTHON": "./old"},
            "MOBA_PYTHON: given './old'; allowed: a Python of 3.11",
        ),
        ("multinode.sh", ["a.yaml"], {"NODE_RANK": "1"}, "NODE_RANK: given 1; allowed: 0 to NODES - 1, which is 0"),
        ("../.ci/run", ["lint", "type"], {}, "given 'type'; allowed: lint types generated site tests core inter"),
        (
            "smollm2.sh",
            ["tune"],
            {},
            "given 'tune'; allowed: prepare, train, finish, retrieval, signal, split, gates, sparsify",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, name: str, arguments: list[str], variables: dict[str, str], error: str
) -> None:
    for python, says in (("bare", "case $2 in *find*) echo torch numpy;; esac"), ("old", "exit 1")):
        (tmp_path / python).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / python).chmod(0o755)
    done = launched(tmp_path, name, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {error}")


@pytest.mark.parametrize("ends", [True, False])
def test_a_base_that_was_interrupted_is_not_made_sparse(tmp_path: Path, ends: bool) -> None:
    (tmp_path / "launch").mkdir()
    for name in ("smollm2.sh", "setup.sh", "usage.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    base = tmp_path / "runs/experiments/conversion/base-seed0"
    (base / "checkpoints").mkdir(parents=True)
    (base / "checkpoints/latest").touch()
    (tmp_path / "runs/retriever-base.json").touch()
    own = "runs/experiments/conversion/corpora/own/needles-32768"
    (base / "config.yaml").write_text(f"data:\n  train:\n  - path: long/train\n  - path: {own}\n    weight: 0.25\n")
    python = tmp_path / "python"
    ended = f"case $* in *conversion*) touch {base}/arm-finished;; esac" if ends else ""
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] || echo $*\n{ended}\n")
    python.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "MOBA_PYTHON": str(python)}
    command = ["bash", str(tmp_path / "launch/smollm2.sh"), "retriever"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
    assert not (tmp_path / "runs/retriever-base.json").exists()
    first, *others = done.stdout.splitlines()
    assert first.startswith("-m experiments conversion ")
    assert done.returncode == (0 if ends else 2)
    assert [f"path: {own}, weight: 0.2}}" in line for line in others] == ([True, False] if ends else [])
    assert ("base-seed0: the base did not end" in done.stderr) is not ends


def test_a_miniature_refuses_a_wrong_override_before_it_prepares_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("nothing to read")
    arguments = ["sft-1m", "--corpus", "text.txt", "optim.lr=fast"]
    done = launched(tmp_path, "miniature.sh", *arguments, MOBA_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (2, "")
    assert "optim.lr: given 'fast'; allowed: number > 0" in done.stderr


def test_a_miniature_evaluates_the_run_that_it_has_trained(tmp_path: Path) -> None:
    """Where an override names another run folder, too; nothing is read from the one that the recipe names."""
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$1 $2 $3" in\n'
        f'-c*|*" config") PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@";;\n'
        f'*) echo "$@" >>"{tmp_path}/log";;\n'
        "esac\n"
    )
    python.chmod(0o755)
    run = tmp_path / "another folder"
    command = ["bash", "launch/miniature.sh", "16k-from-scratch", f"run_dir={run}"]
    environment = {"PATH": os.environ["PATH"], "MOBA_PYTHON": str(python)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    trained, evaluated = (tmp_path / "log").read_text().splitlines()[-2:]
    assert f"moba_train.tools.cli train configs/recipes/mini/16k-from-scratch.yaml run_dir={run} --gpus " in trained
    assert evaluated == f"-m moba_train.tools.cli eval {run} --output {run}/evaluation"
    assert f"logs {run}/metrics.jsonl" in done.stdout


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Launches a program of launch/ in a checkout without data, with a Python that writes what it prepares to `log`."""
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*sysconfig*) echo ${LIBRARY:-/library};;\n"
        "*device_count*) echo 1;;\n"
        f'*data_tools*) echo "$@" >>"{tmp_path}/log"\n'
        '    while [ "$1" != --output ]; do shift; done\n'
        '    touch "$2" "$2.idx" "$2-valid.idx";;\n'
        "esac\n"
    )
    python.chmod(0o755)

    def started(launcher: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [*f"bash launch/{launcher}".split(), *arguments]
        environment = {"PATH": os.environ["PATH"], "MOBA_PYTHON": str(python), **more}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return started


PREPARING = [("quickstart.sh", "runs/quickstart/data"), ("miniature.sh hybrid-90-10", "runs/mini/data")]
"""Launchers that prepare data, and the folder for it."""


@pytest.mark.parametrize(("launcher", "data"), PREPARING)
def test_data_of_another_corpus_is_refused_and_never_used_in_its_place(
    launch: Launch, tmp_path: Path, launcher: str, data: str
) -> None:
    """Without --corpus, what is missing is made of the same corpus as the rest."""
    for name in ("one", "two"):
        (tmp_path / name).touch()
    log = tmp_path / "log"
    for arguments in (["--corpus", "one"], ["--corpus", "one"], []):
        assert launch(launcher, *arguments).returncode == 0
        made = log.read_text().splitlines()
        assert len(made) == len({*made}), "each is made once"
    done = launch(launcher, "--corpus", "two")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: --corpus: given {tmp_path}/two, but {tmp_path}/{data} is of {tmp_path}/one; omit --corpus"
    )
    assert log.read_text().splitlines() == made
    (tmp_path / data / "tokenizer.model").unlink()
    assert launch(launcher).returncode == 0
    assert f"train-tokenizer --input {tmp_path}/one " in log.read_text().splitlines()[-1]


@pytest.mark.parametrize(("launcher", "data"), PREPARING)
def test_data_of_the_standard_library_is_completed_from_that_of_the_python_in_use(
    launch: Launch, tmp_path: Path, launcher: str, data: str
) -> None:
    """And of its sources alone, although another Python has made the rest."""
    assert launch(launcher).returncode == 0
    (tmp_path / data / "tokenizer.model").unlink()
    assert launch(launcher, LIBRARY="/other").returncode == 0
    *_, last = (tmp_path / "log").read_text().splitlines()
    assert "train-tokenizer --input /other " in last
    assert "--glob *.py --exclude site-packages " in last
    assert "is of the standard library; omit --corpus" in launch(launcher, "--corpus", "launch").stderr


def test_a_recipe_is_found_from_the_callers_folder_in_a_checkout_with_spaces(tmp_path: Path) -> None:
    """Leading zeros do not make a number octal, and HOME may be missing."""
    repository = tmp_path / "a checkout"
    (repository / "launch").mkdir(parents=True)
    for script in (ROOT / "launch").glob("*.sh"):
        (repository / "launch" / script.name).write_bytes(script.read_bytes())
    (tmp_path / "my recipe.yaml").write_text("")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "MOBA_PYTHON": "./python",
        "NODES": "10",
        "NODE_RANK": "08",
        "GPUS": "08",
    }
    command = ["bash", "a checkout/launch/multinode.sh", "my recipe.yaml", "name=two words"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"MASTER": "alpha"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[given.index("--node-rank") + 1] == given[given.index("--nproc-per-node") + 1] == "8"
    assert given[-4:] == ["-m", "moba_train.train", str(tmp_path / "my recipe.yaml"), "name=two words"]


def a_checkout(folder: Path, venv: str) -> dict[str, str]:
    """A checkout in `folder` whose python3 makes virtual environments that say `installed` when they install. As
    Python's venv does, it fails where it finds a link to a Python that is gone, unless it may clear the folder."""
    (folder / "bin").mkdir()
    for name in ("launch", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    python = folder / "bin" / "python3"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*"-m venv"*) for last; do :; done\n'
        '    case "$*" in *--clear*) rm -r "$last"; esac\n'
        '    [ ! -h "$last/bin/python" ] || exit 1\n'
        '    mkdir -p "$last/bin"; touch "$last/pyvenv.cfg"; cp "$0" "$last/bin/python";;\n'
        f'*"-m pip"*) sleep 0.5; echo installed >>"{folder}/log";;\n'
        '*"import torch"*) exit 1;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "MOBA_VENV": venv, "FOR": "run"}


SET_UP = 'source launch/setup.sh; [ -x "$PYTHON" ] && echo "$PYTHON"'


def test_nodes_that_start_at_the_same_time_install_once(tmp_path: Path) -> None:
    """With a slash at the end of the folder's name, too: the lock is beside the folder, which does not exist yet."""
    environment = a_checkout(tmp_path, "the venv/")
    command = ["bash", "-c", SET_UP]
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    for node in nodes:
        assert node.communicate(timeout=60)[0].decode().endswith(f"{tmp_path}/the venv/bin/python\n")
        assert node.returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == ["installed"]
    python = tmp_path / "the venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/none/python")
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert len((tmp_path / "log").read_text().splitlines()) == 2, "an environment without its Python is made anew"


def test_a_place_that_takes_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = a_checkout(tmp_path, "file/venv")
    done = subprocess.run(
        ["bash", "-c", SET_UP], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"error: {tmp_path}/file/venv: cannot be written to; MOBA_VENV names another place" in done.stderr


CONTROLLER = """#!/bin/sh
case "$*" in show*) echo host; exit;; esac
echo "$(basename "$0") $*" >>"{log}"
[ "$(grep -c "$(basename "$0")" "{log}")" -ge 3 ] || {{ echo "slurm_load_jobs error: Socket timed out" >&2; exit 1; }}
"""
"""scancel and scontrol, which succeed when they are called for the third time."""
REFUSING = CONTROLLER.replace("-ge 3", "-ge 1000")


@pytest.mark.parametrize(("requeue", "code", "tries"), [(CONTROLLER, 0, 3), (REFUSING, 1, 60)])
def test_a_job_at_its_time_limit_asks_a_busy_controller_again(
    tmp_path: Path, requeue: str, code: int, tries: int
) -> None:
    """The ranks are told to stop, and the job is queued again once they have; all of it ends with their code, or with 1
    where it cannot be queued again."""
    log = tmp_path / "log"
    fakes = {
        "srun": f'#!/bin/sh\ntouch "{log}"\nfor _ in $(seq 400); do\n'
        f'    [ "$(grep -c TERM "{log}")" -lt 3 ] || exit 0\n    /bin/sleep 0.05\ndone\nexit 1\n',
        "scancel": CONTROLLER.format(log=log),
        "scontrol": requeue.format(log=log),
        "sleep": "#!/bin/sh\nexec /bin/sleep 0.05\n",
        "python": "#!/bin/sh\n",
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MOBA_PYTHON": str(tmp_path / "python"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "host",
    }
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "README.md"]
    job = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not log.exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == code
    finally:
        job.kill()
    assert log.read_text().splitlines() == ["scancel --signal=TERM 7"] * 3 + ["scontrol requeue 7"] * tries
