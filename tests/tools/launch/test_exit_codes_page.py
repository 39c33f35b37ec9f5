"""docs/reference/exit-codes.md has every exit code of the programs and launchers, and says after which ones they start
again."""

import ast
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from moba_train.errors import UserError
from moba_train.run.restarts import MOST_STARTS
from moba_train.run.stop import ENDED_BY_INTERRUPT
from moba_train.tools.launch.kubernetes import HOPELESS, STOPPED
from moba_train.tools.launch.torchrun import FAULTS
from tests.guide import ROOT

TEXT = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
TOLD = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| ([^|]+) \|", TEXT, re.MULTILINE)}
RESTARTS = {line.split("|")[1].strip(" `"): line for line in TEXT.split("## Restarts")[1].splitlines() if "| `" in line}


def error_classes(base: type[UserError] = UserError) -> Iterator[type[UserError]]:
    yield base
    for derived in base.__subclasses__():
        yield from error_classes(derived)


ENDS = ("sys.exit", "os._exit", "typer.Exit", "SystemExit")
"""Calls that end a process, with its code."""


def literal_codes(path: Path) -> Iterator[int]:
    """Numbers with which a Python file ends its process."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ENDS:
            numbers = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
            yield from (number for number in numbers if type(number) is int)


def test_every_code_is_told_and_no_other() -> None:
    programs = [*(ROOT / "moba_train").rglob("*.py"), *(ROOT / "data_tools").glob("*.py")]
    written = {code for path in programs for code in literal_codes(path)}
    raised = {cls.exit_code for cls in error_classes()}
    assert {2, 65, 75} == raised
    signals = {128 + signal.SIGKILL, int(str(STOPPED["value"])), ENDED_BY_INTERRUPT}
    assert written | raised | signals == TOLD.keys()


def test_launchers_end_with_a_code_of_the_page() -> None:
    scripts = [*(ROOT / "launch").glob("*.sh"), ROOT / "launch" / "slurm.sbatch"]
    codes = {int(code) for path in scripts for code in re.findall(r"\bexit (\d+)", path.read_text())}
    assert codes
    assert codes <= TOLD.keys()


def test_what_the_page_says_about_restarts_is_so() -> None:
    never = {name: line.split("|")[3] for name, line in RESTARTS.items()}
    jobset = set(map(int, re.findall(r"\d+", never["moba-train launch --k8s jobset"])))
    assert jobset == set(HOPELESS)
    assert set(FAULTS) | {UserError.exit_code} == set(map(int, re.findall(r"\d+", never["launch/slurm.sbatch"])))
    assert set(map(str, FAULTS)) == set(re.findall(r"ends with (\d+) or (\d+), that", TEXT)[0])
    for launcher, variable in (("launch/multinode.sh", "RESTARTS"), ("launch/slurm.sbatch", "REQUEUES")):
        (default,) = re.findall(rf"`{variable}` times \(default: (\d+)\)", RESTARTS[launcher])
        assert "${" + f"{variable}:-{default}" + "}" in (ROOT / launcher).read_text()
    assert f"in {MOST_STARTS} starts" in TEXT
