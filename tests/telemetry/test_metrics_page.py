"""docs/reference/metrics.md names every record type and key of metrics.jsonl, and none that no code writes."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.evals.registry import EVALUATIONS
from moba_train.health.dump import GATE
from moba_train.run import trainer
from moba_train.run.evaluations import STAGE_EXIT
from moba_train.run.reports import BOUNDARY, STAGE
from moba_train.run.step import throughput
from moba_train.telemetry.jsonl import read_records
from tests.guide import ROOT
from tests.run.tiny_run import Run, write_corpus

SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/reference/metrics.md").read_text(), re.M | re.S)
)
PACKAGE = ROOT / "moba_train"
CONSTANTS = {"STAGE": STAGE, "BOUNDARY": BOUNDARY, "STAGE_EXIT": STAGE_EXIT}
PASSED_ON = {"kind", "evaluation.name"}
"""Types that a caller gives, and that are found there."""


def rows(section: str) -> list[list[set[str]]]:
    """The names in code of every cell of the section's tables."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [[set(re.findall(r"`(\w+)`", cell)) for cell in line.strip("|").split("|")] for line in lines]


def told_keys(section: str) -> dict[str, set[str]]:
    """Keys by type; a type may have several rows."""
    found: dict[str, set[str]] = defaultdict(set)
    for (name,), keys, *_ in rows(section):
        found[name] |= keys
    return found


EVENTS = told_keys("Events")
HEAD = {name for (name,), *_ in rows("Every record")}
STEP = {name for (name,), *_ in rows("Steps")}
MEASURED = {next(iter(cells[0])): set().union(*cells[1:]) for cells in rows("Evaluations")}


def calls(method: str) -> Iterator[tuple[ast.Call, ast.FunctionDef]]:
    """Calls of `Telemetry.event`, `RunReports.event` or `Telemetry.alert`, with the function around them."""
    for path in [*PACKAGE.glob("run/*.py"), *PACKAGE.glob("health/*.py"), *PACKAGE.glob("telemetry/*.py")]:
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        for function in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{method}"):
                    yield node, function


def type_of(call: ast.Call) -> str | None:
    """The type of an event; None if the caller gives it."""
    given = call.args[2] if len(call.args) > 2 else call.args[0]
    if isinstance(given, ast.Constant):
        return str(given.value)
    return None if ast.unparse(given) in PASSED_ON else CONSTANTS[ast.unparse(given)]


def keys_of(call: ast.Call, function: ast.FunctionDef) -> set[str]:
    """Keys that a call gives by name, or in a dictionary that its function makes."""
    unpacked = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
    made = {
        str(key.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target) in unpacked
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    return {keyword.arg for keyword in call.keywords if keyword.arg} | (made - {"message"})


def test_every_event_of_the_code_is_told_with_its_keys() -> None:
    written: dict[str, set[str]] = defaultdict(set)
    for call, function in calls("event"):
        if (name := type_of(call)) is not None:
            written[name] |= keys_of(call, function)
    assert len(written) > 12
    assert written.keys() | {"stall"} == EVENTS.keys()
    for name, keys in written.items():
        assert keys <= EVENTS[name], name
    assert {f"gate_{name}" for name in GATE} <= EVENTS["spike"]


def test_every_key_of_an_event_is_in_the_code() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for keys in EVENTS.values():
        for key in keys - {f"gate_{name}" for name in GATE}:
            assert re.search(rf"\b{key}=|\"{key}\"", code), key


def test_every_alert_of_the_code_is_told() -> None:
    given = {ast.unparse(call.args[2]).strip("'") for call, _ in calls("alert")}
    levels = {f"spike_{level}" for level in ("warn", "error", "fatal")}
    told = set().union(*(cells[0] for cells in rows("Alerts")))
    assert {name for name in given if not name.startswith("f'spike_")} | levels == told


def test_every_evaluation_is_told_with_its_numbers() -> None:
    for name, evaluation in EVALUATIONS.usable().items():
        numbers = evaluation.numbers | evaluation.numbers_against_full | {evaluation.data_name or name}
        by_task = name in ("ruler", "longtasks")
        tasks = {number for number in numbers if by_task and number.startswith(f"{name}_")} - {f"{name}_scores"}
        assert MEASURED[name] == (numbers - tasks) | ({f"{name}_TASK"} if tasks else set()), name
    assert MEASURED.keys() == EVALUATIONS.usable().keys()


def is_told(name: str) -> bool:
    """True if the page has this key of a step, or its form."""
    form = re.sub(r"^grad_norm_\w+$", "grad_norm_KIND", re.sub(r"layer_\d+$", "layer_I", name))
    return form in STEP


def test_every_key_of_a_gpu_is_told() -> None:
    tree = ast.parse((PACKAGE / "run" / "step.py").read_text())
    (function,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == throughput.__name__]
    names = [
        node.slice.value
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        if isinstance(node.slice, ast.Constant) and ast.unparse(node.value) == "metrics"
    ]
    assert len(names) == 5
    assert set(names) <= STEP


def test_every_key_of_a_step_is_in_the_code() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in STEP:
        form = re.sub("_(KIND|I)$", "_{", re.sub("^straggler_(step|attention)", "straggler_{name}", name))
        assert f'"{form}' in code, name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two stages, with evaluations and a resume."""
    folder = tmp_path_factory.mktemp("run")
    for seed, name in enumerate(("one", "two", "valid")):
        write_corpus(folder / name, 40, seed)
    run = Run(folder, folder)
    run.recipe["evaluation"] |= {"position_wise": {"bucket": 32, "sequences": 2}, "gate_probe": {"queries": 8}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "COMPARE_EVERY", 1)
        assert run.train_here("--stop-at-step", "4") == 0
        assert run.train_here() == 0
    return run


def test_every_record_of_a_run_is_told(run: Run) -> None:
    seen = set()
    for record in read_records(Path(run.run_dir) / "metrics.jsonl"):
        seen.add(record["type"])
        keys = record.keys() - HEAD - {"message"}
        if record["type"] == "metrics":
            assert [key for key in keys if not is_told(key)] == []
        else:
            assert keys <= (EVENTS | MEASURED)[record["type"]], record
    assert {"metrics", "code", "stage", "resume", "checkpoint", "boundary", "position_wise", "gate_probe"} <= seen
