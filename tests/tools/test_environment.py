"""`moba-train env` says which kernels run, which torch has faster ones, and the versions that docs and image name."""

import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from moba_train.attention.kernels import table
from moba_train.attention.kernels.table import Machine
from moba_train.tools import lm_eval
from moba_train.tools.environment import BEST_PAIR, OPTIONAL_PACKAGES, print_kernels
from moba_train.tools.report import sink as report

ROOT = Path(__file__).parents[2]
FASTER = f"faster ones come with Triton {BEST_PAIR[1]}: pip install torch=={BEST_PAIR[0]}"
"""The last line, whose end can be copied."""


@pytest.fixture(autouse=True)
def warned_of_nothing_yet() -> Iterator[None]:
    table._warn_of_slower.cache_clear()
    yield
    table._warn_of_slower.cache_clear()


def printed(machine: Machine) -> str:
    console = Console(file=io.StringIO(), markup=False, width=1000)
    print_kernels(console, machine)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("machine", "forward", "backward", "notes"),
    [
        (Machine("cuda", (9, 0), BEST_PAIR[1]), "hopper/blocks_from_512_forward", "hopper/blocks_256", []),
        (
            Machine("cuda", (9, 0), "3.7.1"),
            "triton/blocks_from_144_forward",
            "triton/blocks_from_144_dq",
            ["Triton 3.7.1 is installed, but", FASTER],
        ),
        (
            Machine("cuda", (12, 0), "3.7.1"),
            "triton/blocks_from_144_forward",
            "triton/blocks_from_144_dq",
            ["compute capability (12, 0), the fastest kernels are for (9, 0)"],
        ),
        (Machine("cuda", (9, 0), None), "composed, on", "composed, on", [FASTER]),
        *(
            (Machine("cuda", (7, 5), one), "reference, compute", "reference, compute", [])
            for one in (BEST_PAIR[1], None)
        ),
    ],
)
def test_the_kernels_of_a_gpu_and_the_torch_that_has_faster_ones(
    machine: Machine, forward: str, backward: str, notes: list[str]
) -> None:
    packages = frozenset({"torch's FlashAttention-2"})
    text = printed(Machine(machine.device, machine.capability, machine.triton, packages=packages))
    assert re.search(rf"│ 512 +│ {forward}.* │ {backward}", text), text
    told = text.partition("┘")[2].strip().splitlines()
    assert len(told) == len(notes), told
    for line, note in zip(told, notes, strict=True):
        assert line.startswith(note)


def test_without_a_gpu_the_reference_runs() -> None:
    assert printed(Machine("cpu")) == "block-sparse attention: reference, on cpu\n"


def test_the_best_pair_is_that_of_the_lock_for_gpus() -> None:
    lock = (ROOT / "launch" / "gpu.lock").read_text()
    assert all(f"\n{name}=={version} " in lock for name, version in zip(("torch", "triton"), BEST_PAIR, strict=True))


def test_the_image_the_guide_and_moba_train_env_name_the_same_versions() -> None:
    guide, dockerfile = (
        (ROOT / file).read_text() for file in ("docs/how-to/optional-packages.md", "docker/Dockerfile")
    )
    pinned = {name for package in OPTIONAL_PACKAGES for name in re.findall(r"[\w\[\],-]+==[\d.a-z]+", package.install)}
    assert len(pinned) == 6
    assert not {name for name in pinned if name not in guide or name not in dockerfile}


def test_commands_that_install_a_package_ask_for_what_the_extras_ask_for() -> None:
    """Commands name packages, because moba-train is on no index: so they hold for a checkout and for a wheel."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {requirement for extra in extras.values() for requirement in extra if ">=" in requirement}
    commands = [package.install for package in OPTIONAL_PACKAGES] + [report.INSTALL, lm_eval.INSTALL]
    asked = {word for command in commands if command.startswith("pip") for word in shlex.split(command) if ">=" in word}
    assert len(asked) == 5
    assert asked <= wanted
