"""docker/Dockerfile, its steps run in a plain Debian made by debootstrap, without a container registry.

    MOBA_DEBIAN=1 python -m pytest tests/test_docker.py

Needs root, Debian's package debootstrap, 6 GB of disk, about twenty minutes on two cores, and this machine's network
and pip configuration, by which pip must find a CPU build of torch (`PIP_EXTRA_INDEX_URL` or `PIP_FIND_LINKS`).
Packages are installed with that Debian's own Python, 3.11.2.

What it leaves out: the base image, replaced by that Debian with a CPU build of torch; the optional GPU packages, whose
arguments are 0 by default; the stage with apex.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = "python3,python3-pip,python3-dev,python-is-python3,g++,git,ca-certificates"
TORCH = f"torch=={torch.__version__.partition('+')[0]}+cpu"  # the suffix refuses a build for CUDA
SOURCES = ["index-url", "extra-index-url", "find-links", "no-index", "trusted-host"]
CONNECTION = ["cert", "client-cert", "proxy", "timeout", "default-timeout", "retries"]
Step = tuple[str, str]


def steps(dockerfile: str) -> list[Step]:
    """Instructions and their arguments up to the second stage; continued lines joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]
    stages = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    return found[: stages[1]]


def network_settings() -> dict[str, str]:
    """Where and how this machine's pip finds packages, as environment variables; local paths moved below /host."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    settings = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment overrides
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in SOURCES + CONNECTION:
            local = re.sub(r"(^|\s|file://)/", r"\1/host/", ast.literal_eval(value))
            settings["PIP_" + name.upper().replace("-", "_")] = local
    return settings


class Debian:
    """A Debian below `root` with Python and a compiler, in which commands run as in a container.

    It shares this machine's network and sees its files below /host, read-only, where pip's local indexes may be.
    """

    def __init__(self, root: Path) -> None:
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)], check=True)
        (root / "host").mkdir()
        (root / "constraints.txt").write_text(TORCH)
        shutil.copy("/etc/hosts", root / "etc")  # torchrun looks up localhost
        self.root = root
        self.folder = "/"
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            **network_settings(),
            "PIP_CONSTRAINT": "/constraints.txt",
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }

    def run(self, command: str) -> None:
        """Run `command` by the shell, in the current folder."""
        (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        host = f"{self.root}/host"
        mounts = f"mount --rbind / {host} && mount -o remount,bind,ro {host}"
        mounts += f" && mount -t proc proc {self.root}/proc && mount --rbind /dev {self.root}/dev"
        enter = f'{mounts} && exec chroot {self.root} env -C {self.folder} sh -c "$1"'
        arguments = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter, "sh", command]
        subprocess.run(arguments, env=self.environment, check=True)

    def take(self, name: str, rest: str) -> None:
        """Follow one instruction of a Dockerfile."""
        match name:
            case "FROM":  # torch is all that is asked of the base image
                self.run(f"pip install --no-cache-dir {TORCH}")
            case "ARG" | "ENV":
                key, _, value = rest.partition("=")
                self.environment[key] = value
            case "WORKDIR":
                self.folder = rest
            case "COPY":
                assert rest == ". .", rest
                target = self.root / self.folder.lstrip("/")
                target.mkdir(parents=True, exist_ok=True)
                files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
                subprocess.run(["tar", "-x", "-C", str(target)], input=files, check=True)
            case "RUN":
                self.run(rest)
            case _:
                raise AssertionError(f"an instruction that this test does not know: {name} {rest}")


@pytest.mark.skipif("MOBA_DEBIAN" not in os.environ, reason="MOBA_DEBIAN=1 asks for it")
@pytest.mark.timeout(3600)
def test_its_steps_lead_to_the_quick_start_in_a_plain_debian(tmp_path: Path) -> None:
    if shutil.which("debootstrap") is None:
        pytest.skip("not installed: debootstrap; apt-get install debootstrap")
    debian = Debian(tmp_path / "debian")
    *build, (last, command) = steps((ROOT / "docker" / "Dockerfile").read_text())
    assert last == "CMD"
    for name, rest in build:
        debian.take(name, rest)
    debian.run(" ".join(json.loads(command)))
    run = debian.root / "opt" / "moba_train" / "runs" / "quickstart"
    assert list(run.glob("checkpoints/step_*"))
    assert (run / "report.html").is_file()
    shutil.rmtree(debian.root)  # kept only after a failure


def test_the_dockerfile_copies_installs_and_starts_the_quick_start() -> None:
    found = steps((ROOT / "docker" / "Dockerfile").read_text())
    assert [name for name, _ in found][:4] == ["ARG", "FROM", "WORKDIR", "COPY"]
    assert found[-1] == ("CMD", '["bash", "launch/quickstart.sh"]')
    assert Path(ROOT, *json.loads(found[-1][1])[1:]).is_file()


def test_the_image_has_nothing_of_a_checkout_that_git_leaves_out() -> None:
    """Among them are runs with checkpoints of gigabytes."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    left_out = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored <= {line.removeprefix("**/") for line in left_out}
