"""Names and messages from elsewhere reach a terminal as text: they neither command it nor end a program."""

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moba_train.terminal import safe_terminal, visible
from moba_train.tools.cli import app
from moba_train.train import main

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\udcff\u202ey"
SHOWN = r"x\x1b]0;owned\x07\x1b[2J\x9b31m\udcff\u202ey"


class Terminal(io.TextIOWrapper):
    """A terminal in memory, which refuses what UTF-8 does not have."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]  # a BytesIO


def test_control_characters_become_escapes_and_lines_stay() -> None:
    assert visible(f"{EVIL}\n\tz ä 中 \U0001f600") == f"{SHOWN}\n\tz ä 中 \U0001f600"
    red = "\x1b[1;31m"
    assert visible(f"{red}a\x1b[2J", colours=True) == rf"{red}a\x1b[2J"
    assert visible(f"{red}a") == r"\x1b[1;31ma"


def test_all_that_is_printed_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with safe_terminal():
        print(EVIL)
        logging.StreamHandler(sys.stderr).emit(logging.LogRecord("", logging.WARNING, "", 0, EVIL, None, None))
        Console(force_terminal=True, markup=False, highlight=False).print(EVIL, style="red", soft_wrap=True)
    text = terminal.text()
    assert text.count("]0;owned") == 3
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "\x1b[31m" in text, "rich's own colour"


def test_a_program_without_an_output_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with safe_terminal():
        print(EVIL)


@pytest.mark.parametrize("arguments", [["report"], ["verify"], ["config"], ["plan"]])
def test_a_name_on_the_command_line_does_not_command_the_terminal(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / EVIL)])
    assert result.exit_code != 0
    assert not isinstance(result.exception, UnicodeError)
    assert "\x1b" not in result.output
    assert "\\x1b" in result.output


def test_nor_does_one_of_a_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / EVIL)]) == 2
    assert SHOWN in capsys.readouterr().err
