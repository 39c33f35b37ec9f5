"""Every benchmark program starts and tells its options anywhere, and every result can be made again by its command."""

import argparse
import importlib
import json
import math
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
import experiments
from benchmarks import record

FOLDER = Path(benchmarks.__file__).parent
EXPERIMENTS = Path(experiments.__file__).parent
RESULTS = sorted({*(FOLDER / "results").glob("*.json")} - {*(FOLDER / "results").glob("calibrated-*")})
"""All but files of `moba-train calibrate`, whose note says what they are."""
FIGURES = sorted((EXPERIMENTS / "results").glob("*.json"))
MODULES = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
PROGRAMS = [name for name in MODULES if "\ndef main(" in (FOLDER / f"{name}.py").read_text()]
GONE = {
    *("activations", "checkpoint_python", "checkpoint_threads", "index_memory", "page_locked", "probe_cost"),
    "real_corpus",
}
"""Programs whose question is settled, or that were wrong; the commits of their results have them."""
ASKED = ["git", "rev-parse", "--is-shallow-repository"]
SHALLOW = subprocess.run(ASKED, cwd=FOLDER, capture_output=True, text=True, check=False).stdout != "false\n"
"""True if the history is not here."""


class ParsedError(Exception):
    """The program has read its options: enough."""


def read_options(monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]) -> None:
    """Start a program and end it where it has read its options; SystemExit where it does not know them."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any) -> None:
        real(self, *arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(ParsedError):
        importlib.import_module(name).main()


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_given_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["attention", "context_timeline", "crossover", "full_attention", "training"])
def test_a_missing_gpu_is_told_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [name, *(["--output", "unused.json"] if name == "training" else [])])
    with pytest.raises(SystemExit, match=r"^2$"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "1 GPU(s) needed" in capsys.readouterr().err


@pytest.mark.parametrize("path", [*RESULTS, *FIGURES], ids=lambda path: path.stem)
def test_a_result_names_its_commit_and_a_command_of_todays_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads(path.read_text())
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert not re.search(r"""["' =]/\w+/""", path.read_text()), "a path of the machine it was measured on"
    launcher, _, command = result["command"].partition("-m ")
    assert re.fullmatch(r"python |torchrun --nproc-per-node \d+ ", launcher)
    name, *options = shlex.split(command)
    assert name.startswith("benchmarks.") or name == "experiments"
    if name.removeprefix("benchmarks.") in GONE:
        found = ["git", "cat-file", "-e", f"{result['commit']}:{name.replace('.', '/')}.py"]
        assert SHALLOW or subprocess.run(found, cwd=FOLDER, check=False).returncode == 0
    else:
        read_options(monkeypatch, "experiments.__main__" if name == "experiments" else name, options)


def test_the_contents_list_every_program_and_every_result() -> None:
    programs, results = ((FOLDER / name).read_text() for name in ("README.md", "RESULTS.md"))
    assert [name for name in PROGRAMS if f"`{name}`" not in programs] == []
    assert [path.name for path in (FOLDER / "results").iterdir() if f"(results/{path.name})" not in results] == []


def test_some_page_or_comment_cites_every_result_and_the_log_alone_does_not_suffice() -> None:
    root = FOLDER.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(FOLDER / "measured").glob("*.md")]
    pages += EXPERIMENTS.glob("*.md")
    code = [path for path in (root / "moba_train").rglob("*") if path.suffix in (".py", ".json")]
    cited = set(re.findall(r"[\w-]+\.(?:json|txt)", "".join(path.read_text() for path in (*pages, *code))))
    held = {path.name for folder in (FOLDER, EXPERIMENTS) for path in (folder / "results").iterdir()}
    assert held - cited == set()


def test_some_page_shows_every_picture() -> None:
    root = FOLDER.parent
    text = "".join(
        path.read_text() for path in [root / "README.md", *FOLDER.rglob("*.md"), *(root / "docs").rglob("*.md")]
    )
    assert [path.name for path in (root / "docs" / "images").iterdir() if f"images/{path.name})" not in text] == []


@pytest.mark.parametrize("path", [*RESULTS, *FIGURES], ids=lambda path: path.name)
def test_every_json_reader_accepts_the_results(path: Path) -> None:
    json.loads(path.read_text(), parse_constant=pytest.fail)


def test_a_number_that_is_not_finite_is_saved_as_json(tmp_path: Path) -> None:
    record.save(tmp_path / "result.json", {"budget_seconds": math.inf}, {"loss": math.nan})
    content = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert (content["settings"]["budget_seconds"], content["results"]["loss"]) == ("Infinity", "NaN")


def test_a_result_of_several_ranks_says_how_they_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["some/folder/context_skew.py", "--tokens", "64K"])
    assert record.provenance()["command"] == "python -m benchmarks.context_skew --tokens 64K"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert record.provenance()["command"].startswith("torchrun --nproc-per-node 4 -m benchmarks.context_skew ")
