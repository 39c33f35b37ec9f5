"""`moba-train` as users meet it: fast help, exit codes, messages without tracebacks."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from moba_train import __version__
from moba_train.config.load import load_config
from moba_train.environment import code_version, describe_code, import_problem
from moba_train.tools.cli import app
from moba_train.tools.cli_options import table_console
from moba_train.tools.environment import OPTIONAL_PACKAGES
from tests.commands import run_app

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/models/tiny.yaml"
runner = CliRunner()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"extends: {os.path.relpath(TINY, tmp_path)}\n"
        "name: demo\nrun_dir: runs/demo\ndata: {train: [{path: corpus}]}\nbatch_tokens: 64K\n"
        "stages: [{name: only, seq_len: 4K, tokens: 1M}]\n"
    )
    return path


def test_help_starts_at_once_without_heavy_imports() -> None:
    program = (
        "import sys\nsys.argv = ['moba-train', '--help']\nfrom moba_train.tools.cli import app\n"
        "try:\n    app()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'pydantic', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
        "assert len(sys.modules) < 400, len(sys.modules)\n"  # 339 with typer 0.29: half of them its own
    )
    times = []
    for _ in range(3):  # of processor time, the least of three: this machine may be busy with other things
        before = os.times()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))  # of children
        assert done.returncode == 0, done.stderr
        assert "plan" in done.stdout
    assert min(times) < 0.3


def test_help_of_every_command_loads_nothing_heavy() -> None:
    """All pages in one process, so that what any of them loads is found. Typer 0.29 itself loads pydantic for them."""
    program = """
import sys
import typer
from data_tools.cli import app as data
from moba_train.tools.cli import app
def walk(command, path):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, [*path, name])
for tool in (app, data):
    for path in walk(typer.main.get_command(tool), []):
        try:
            tool([*path, "--help"])
        except SystemExit as stop:
            assert stop.code == 0, path
        assert not {"torch", "numpy", "yaml"} & set(sys.modules), path
        assert len(sys.modules) < 500, (path, len(sys.modules))  # 442 with typer 0.29
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") > 30


@pytest.mark.parametrize("command", ["plan", "train", "eval", "report"])
def test_help_fills_its_lines(command: str) -> None:
    """Typer 0.29 prints the line breaks of docstrings, which cut lines short in a terminal."""
    text = runner.invoke(app, [command, "--help"], terminal_width=80).stdout.partition("╭")[0]
    lines = [line.strip() for line in text.splitlines()]
    assert len(lines) > 3
    for line, after in pairwise(lines):
        assert not after or not line or len(line) + len(after.split()[0]) >= 77, (line, after)


def test_no_metavar_is_the_name_of_its_option_in_capitals() -> None:
    """Typer 0.27 makes it the option: `--tokens` with the metavar TOKENS could only be given as --TOKENS."""
    waiting = [typer.main.get_command(app)]
    checked = 0
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for option in command.params:
            if option.opts == [f"--{option.name}"]:
                checked += 1
                assert option.metavar != f"{option.name}".upper(), f"{command.name} --{option.name}"
    assert checked > 50


def test_version_names_the_commit() -> None:
    result = run_app(app, "--version")
    assert result.stdout == f"{describe_code(code_version())}\n"
    assert result.stdout.startswith(f"moba_train {__version__}")


def test_plan_prints_the_layout_and_what_it_costs(recipe: Path) -> None:
    done = run_app(app, "plan", recipe, "stages.0.tokens=2M", "--gpus", "4", "--no-data")
    for part in ("4 GPUs: dp_replicate 1 x dp_shard 4", "1,311,872", "65,536", "4 moba", "dense causal", "optimizer"):
        assert part in done.output, part


def test_a_users_mistake_is_a_message_and_exit_code_2(recipe: Path) -> None:
    done = run_app(app, "plan", recipe, "model.kv_heads=3", "--gpus", "5", "--no-data", code=2)
    assert "error: 2 problems in the configuration" in done.stderr
    assert "model.kv_heads: given 3" in done.stderr
    assert "5 data-parallel ranks" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["plan", "recipe.yaml", "--gpus", "0"], "0"),
        (["plan", "recipe.yaml", "--network", "nan"], "nan"),
        (["plan", "recipe.yaml", "--network", "inf"], "inf"),
        (["plan", "recipe.yaml", "--gpu", ""], "''"),
        (["generate", "run", "--prompt", "x", "--seed", "99999999999999999999"], "99999999999999999999"),
        (["generate", "run", "--prompt", "x", "--max-new-tokens", "1000000000000"], "1000000000000"),
        (["convert", "moba-to-hf", "run", "new", "--dtype", "float8"], "float8"),
    ],
)
def test_a_value_out_of_range_is_named_once(arguments: list[str], given: str) -> None:
    done = run_app(app, *arguments, code=2)
    assert done.stderr.count(f"given {given}; ") == 1 or f"{given} is not in the range" in done.stderr


@pytest.mark.parametrize("command", ["eval", "fit-scaling"])
def test_a_file_in_place_of_an_output_folder_is_refused_before_the_work(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    for output in ("file", "file/inside"):
        done = run_app(app, command, tmp_path, "--output", tmp_path / output, code=2, env={"COLUMNS": "500"})
        assert (
            f"--output: given {tmp_path / output}; allowed: a folder, and {tmp_path / 'file'} is a file" in done.stderr
        )


def test_a_bug_of_ours_keeps_its_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.tools.plan.command.make_plan", lambda *_, **__: 1 / 0)
    assert isinstance(runner.invoke(app, ["plan", str(recipe), "--no-data"]).exception, ZeroDivisionError)


def test_config_prints_yaml_that_loads_back(recipe: Path, tmp_path: Path) -> None:
    done = run_app(app, "config", recipe, "seed=7")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(done.output)
    assert load_config(resolved) == load_config(recipe, ["seed=7"])
    assert yaml.safe_load(done.output)["model"]["hidden_size"] == 128


def test_schema_prints_json() -> None:
    done = runner.invoke(app, ["schema"])
    assert json.loads(done.output)["title"] == "RunConfig"


def test_a_recipe_that_asks_for_a_missing_package_is_refused_before_training(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moba_train.tools.sinks.wandb.find_spec", lambda name: None)
    done = run_app(app, "plan", recipe, "telemetry.wandb.mode=offline", code=2)
    assert (
        "telemetry.wandb: given mode 'offline', but the package wandb is not installed; "
        "pip install wandb, or set telemetry.wandb.mode=disabled"
    ) in done.stderr


def test_env_reports_every_optional_package_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.tools.environment.import_problem", lambda features: "ModuleNotFoundError: gone")
    done = run_app(app, "env", env={"COLUMNS": "300"})
    for package in OPTIONAL_PACKAGES:
        assert package.name in done.output
        assert package.gives in done.output
        assert package.install in done.output


def test_env_lists_only_packages_that_something_imports() -> None:
    sources = [*ROOT.glob("moba_train/**/*.py"), *ROOT.glob("data_tools/**/*.py")]
    text = "".join(path.read_text() for path in sources if path.name != "environment.py")
    for package in OPTIONAL_PACKAGES:
        for module, _ in package.features:
            imported = module if module.startswith("torch.") else module.split(".")[0]
            assert re.search(rf'(from |import |import_module\("|"){re.escape(imported)}\b', text), package.name


def test_packages_are_probed_by_what_they_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "without_kernels.py").write_text("")
    (tmp_path / "without_library.py").write_text("raise OSError('libcudart.so.13 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_problem([("json", "dumps")]) == ""
    assert "AttributeError" in import_problem([("json", "dumps"), ("without_kernels", "FusedAdam")])
    assert "libcudart.so.13" in import_problem([("without_library", "x")])
    assert "ModuleNotFoundError" in import_problem([("absent_package", "x")])


def test_brackets_in_names_and_paths_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """rich would take them for its markup and leave them out."""
    table_console().print("stage long: corpus /data/[old]/one")
    assert capsys.readouterr().out == "stage long: corpus /data/[old]/one\n"
