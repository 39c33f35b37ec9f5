"""For tests of documents: their blocks of code, and their commands run in this process."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

import data_tools.cli
import moba_train.tools.cli
from moba_train import train

ROOT = Path(__file__).parents[1]
PROGRAMS = {"moba-train": moba_train.tools.cli.app, "moba-data": data_tools.cli.app}


def blocks(document: Path, language: str) -> list[str]:
    """The contents of its fenced blocks in `language`."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def links(document: Path) -> list[str]:
    """Where its links lead inside the repository, relative to it."""
    return re.findall(r"\]\(((?!http)[^)\s]+)\)", document.read_text())


def anchors(document: Path) -> set[str]:
    """What a link may name after `#`: its headings, as GitHub writes them."""
    text = re.sub("```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall("^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def commands(block: str) -> list[list[str]]:
    """Its lines as words, continued lines joined, comments left out."""
    lines = block.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(command: list[str], *more: str) -> str:
    """Run `moba-train ...` or `moba-data ...` with `more` arguments and return what it prints. Training is on one rank
    and prints nothing here."""
    program, *arguments = command
    if command[:2] == ["moba-train", "train"]:
        given = re.sub(r"--gpus \d+", "", shlex.join(arguments[1:]))
        assert train.main([*shlex.split(given), *more]) == 0, shlex.join(command)
        return ""
    done = CliRunner().invoke(PROGRAMS[program], [*arguments, *more])
    assert done.exit_code == 0, f"{shlex.join(command)}\n{done.output}"
    return done.output


def check_usage(command: list[str]) -> None:
    """Raises a usage error when the program has no such command, option or kind of value. Runs nothing."""
    name, *arguments = command
    parsed: Any = typer.main.get_command(PROGRAMS[name])
    context: Any = None
    while hasattr(parsed, "resolve_command"):
        context = parsed.make_context(name, list(arguments), parent=context)
        name, parsed, arguments = parsed.resolve_command(context, arguments)
    parsed.make_context(name, list(arguments), parent=context)


def shown_lines(shown: str, printed: str) -> list[str]:
    """The lines of a page's output that a program did not print, in this order; spaces and `...` do not count."""
    text = " ".join(printed.split())
    missing = []
    for line in shown.splitlines():
        words = " ".join(line.split())
        place = text.find(words)
        if words == "..." or not words:
            continue
        if place < 0:
            missing.append(line)
        else:
            text = text[place + len(words) :]
    return missing
