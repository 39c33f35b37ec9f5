"""A release: its versions agree, and its wheel is complete and trains the miniature in an environment with nothing but
it and its dependencies."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moba_train import __version__, registry
from moba_train.attention.kernels.table import _GLUON_TRITON
from tests.guide import ROOT, blocks, commands

FOLDERS = ("moba_train", "data_tools", "configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
SMALL = [
    "batch_tokens=2K",
    "stages.0.micro_batch_size=4",
    "stages.0.tokens=4K",
    "stages.1.tokens=4K",
    "optim.schedule.warmup_tokens=2K",
    "evaluation.sequences=2",
    "evaluation.position_wise.sequences=2",
]
"""Overrides that leave each stage of the quick start two steps of half the tokens."""


_LIST = "import json, sys, moba_train.registry as r; print(json.dumps([[*vars(r)[name]] for name in sys.argv[1:]]))"


def done(command: list[str], folder: Path) -> str:
    """What `command` prints. It runs in `folder`, without this checkout on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and sdist of a commit, as `python -m build` makes them: the wheel from the sdist, where
    there is no git."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "release"]):
        done([*git, *arguments], source)
    done([sys.executable, "-m", "build", "--no-isolation"], source)
    return source / "dist"


def test_package_changelog_and_citation_have_one_version() -> None:
    unreleased, newest, *_ = re.findall("^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - (\d{{4}}-\d\d-\d\d|not tagged yet)", newest)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_every_extra_that_a_page_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    installed = [found for page in pages for found in re.findall(r"-e ['\"]\.\[([\w,]+)\]", page.read_text())]
    named = {extra for extras in installed for extra in extras.split(",")}
    assert {"wandb", "report"} <= named <= project["optional-dependencies"].keys()
    wanted = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    assert not wanted & {"wandb", "plotly", "matplotlib", "tensorboard"}
    assert {"sentencepiece", "protobuf"} <= wanted, "`moba-data tokenize` failed in an environment without wandb"


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_a_lock_has_what_the_package_needs_each_file_by_its_hash(machine: str) -> None:
    """Dependencies, with the extras of a run: for the CPU in versions that CI tests, for GPUs with the torch and the
    Triton that the fastest kernels need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["report"], *extras["wandb"]]
    limits = [line.partition("#")[0] for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines()]
    if machine == "gpu":
        needed += [*extras["fp8"], "triton"]
        limits = ["torch==2.11.*", f"triton=={_GLUON_TRITON}.*"]
    lock = (ROOT / "launch" / f"{machine}.lock").read_text()
    entries = re.split(r"\n(?=[a-z])", re.sub("^#.*\n", "", lock, flags=re.M))
    assert all(re.search("--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    locked = dict(entry.split(maxsplit=1)[0].split("==") for entry in entries)
    wanted = [Requirement(text) for text in needed]
    assert {canonicalize_name(one.name) for one in wanted} <= locked.keys()
    for one in [*wanted, *map(Requirement, filter(str.strip, limits))]:
        name = canonicalize_name(one.name)
        assert name not in locked or one.specifier.contains(locked[name].partition("+")[0]), one


def test_wheel_and_sdist_have_all_modules_recipes_and_licences(built: Path) -> None:
    modules = {path.relative_to(ROOT).as_posix() for name in FOLDERS[:2] for path in (ROOT / name).rglob("*.py")}
    recipes = {f"moba_train/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(recipes) > 20
    data = {"moba_train/tools/plan/h200.json", "moba_train/tools/report/assets/report.js"}
    package = f"moba_train-{__version__}"
    with zipfile.ZipFile(built / f"{package}-py3-none-any.whl") as wheel:
        held = {*wheel.namelist()}
        metadata = wheel.read(f"{package}.dist-info/METADATA").decode()
    data |= {"moba_train/COMMIT", "moba_train/pyproject.toml"}
    assert modules | recipes | data | {f"{package}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= held
    assert "License-Expression: Apache-2.0" in metadata.splitlines()
    with tarfile.open(built / f"{package}.tar.gz") as sdist:
        assert {f"{package}/{name}" for name in modules | recipes | {*FILES}} <= {*sdist.getnames()}


@pytest.mark.slow
def test_a_wheel_alone_runs_the_quick_start_of_the_guide(built: Path, tmp_path: Path) -> None:
    """The environment finds the dependencies in this one's, but not what this one knows of the checkout."""
    done([sys.executable, "-m", "venv", "--without-pip", "venv"], tmp_path)
    programs = tmp_path / "venv" / "bin"
    packages = Path(
        done([str(programs / "python"), "-c", "import site; print(site.getsitepackages()[0])"], tmp_path)[:-1]
    )
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    done([*pip, *map(str, built.glob("*.whl"))], tmp_path)

    folder = tmp_path / "elsewhere"
    (folder / "corpus").mkdir(parents=True)
    for number, source in enumerate(sorted((ROOT / "moba_train").rglob("*.py"))[::3]):  # enough for some to be held out
        shutil.copy(source, folder / "corpus" / f"{number}.txt")
    found = done(
        [str(programs / "python"), "-c", "import moba_train, data_tools; print(moba_train, data_tools)"], folder
    )
    assert found.count(str(packages)) == 2
    commit = done(["git", "rev-parse", "HEAD"], built.parent)[:12]
    assert done([str(programs / "moba-train"), "--version"], folder) == f"moba_train {__version__}, commit {commit}\n"
    members = ("EVALUATIONS", "MODEL_FAMILIES")  # their order counts
    listed = done([str(programs / "python"), "-c", _LIST, *members], folder)
    assert json.loads(listed) == [[*getattr(registry, name)] for name in members]
    (quick_start,) = [block for block in blocks(ROOT / "docs" / "install.md", "bash") if "moba-train train" in block]
    for program, *arguments in commands(quick_start):
        done([str(programs / program), *arguments, *(SMALL if arguments[0] == "train" else [])], folder)
    run = folder / "runs" / "quickstart"
    (checkpoint,) = (run / "checkpoints").glob("step_*4")
    assert len([*checkpoint.glob("rank_?_0.safetensors")]) == 2, "each rank saves its part"
    assert list((run / "evaluations").glob("*.json"))
    assert (run / "report.html").is_file()
