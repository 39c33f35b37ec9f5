"""docs/tutorials/first_hour.ipynb: its cells run from top to bottom and print what the text around them says; the
outputs that it holds are those of one run, small, and name no machine.

`jupyter execute --inplace docs/tutorials/first_hour.ipynb` makes new ones.
"""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import warm_commands
from tests.forked import forked
from tests.guide import ROOT

NOTEBOOK = ROOT / "docs" / "tutorials" / "first_hour.ipynb"
SHORTENED = {
    'SHORT_TOKENS = "300K"': 'SHORT_TOKENS = "20K"',  # 14 steps in place of 114 in the two stages, of half the tokens
    'LONG_TOKENS = "160K"': 'LONG_TOKENS = "8K"',
    "{Path(sys.executable).parent}:{os.environ['PATH']}": "{os.environ['PATH']}",  # the commands are ours
    "batch_tokens: 4K": "batch_tokens: 2K",
    "--glob '*.py'": "--glob '[a-h]*.py'",
    "micro_batch_size: 8": "micro_batch_size: 4",
    "micro_batch_size: 2": "micro_batch_size: 1",
    "  sequences: 16": "  sequences: 4",
    "position_wise.sequences=16": "position_wise.sequences=4",
    "  log_every: 5": "  log_every: 5\n  report: false",
}


@contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """A folder of the two commands, as forks of one process that has imported them; they train on one rank."""
    program, address = warm_commands.__file__, folder / "warm"
    for name in ("moba-train", "moba-data"):
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{program}" "{address}" {name} "$@"\n')
        command.chmod(0o755)
    server = forked().Process(target=warm_commands.serve, args=(str(address),))
    server.start()
    try:
        while not address.exists():
            assert server.is_alive()
            time.sleep(0.05)
        yield folder / "bin"
    finally:
        server.kill()
        server.join()


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything that its cells print, one after the other."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.text for output in outputs if output.output_type == "stream")


def plots(notebook: nbformat.NotebookNode) -> int:
    """Number of plots in its outputs."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def numbers(pattern: str, text: str) -> list[float]:
    """The number that each place of `text` has where `pattern` has a group."""
    return [float(number) for number in re.findall(pattern, text)]


def check_outputs(notebook: nbformat.NotebookNode) -> None:
    """What every run of the notebook shows, however long it trains."""
    text = printed(notebook)
    assert "unknown key (did you mean 'topk'?)" in text
    assert "stopped as asked after step 5;" in text
    assert "resumed from the checkpoint of step 5," in text
    equal, tensors = numbers(r"(\d+) of \d+ tensors are equal", text) + numbers(r"\d+ of (\d+) tensors are equal", text)
    assert equal == tensors > 100

    held_out = numbers(r"held-out loss (\S+)", text)
    assert len(held_out) >= 2
    assert 7.6 > held_out[0] > held_out[-1]
    moba, full = numbers(r"MoBA (\S+), full attention", text) + numbers(r"full attention (\S+) nats", text)
    assert moba == pytest.approx(held_out[-1], abs=0.001)
    assert full == pytest.approx(moba, abs=0.1)

    output = numbers(r"of 8 blocks: output differs by (\S+),", text)
    gradients = numbers(r"gradients by (\S+)", text)
    assert len(output) == len(gradients) == 4
    assert output[2] > 0.1 > 1e-5 > output[3]
    assert gradients[2] > 0.1 > 1e-4 > gradients[3]

    assert "equal token ids: True" in text
    in_transformers = numbers(r"full: loss (\S+)", text) + numbers(r"moba: loss (\S+)", text)
    assert in_transformers[0] != in_transformers[1] == pytest.approx(in_transformers[0], abs=0.2)
    assert plots(notebook) == 2


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for ours, fewer in SHORTENED.items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and ours in cell.source)
        assert cell.source.count(ours) == 1
        cell.source = cell.source.replace(ours, fewer)

    with commands(tmp_path) as programs:  # before the environment is this test's: other tests have the same fork server
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # the kernel is this Python, not a user's
        NotebookClient(notebook, kernel_name="python3", timeout=300, coalesce_streams=True).execute()
    check_outputs(notebook)
    (folder,) = tmp_path.glob("first-hour-*")
    assert {path.name for path in folder.iterdir()} >= {"recipe.yaml", "data", "runs", "exported"}


def test_its_outputs_are_of_one_run_and_name_no_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    check_outputs(notebook)
    assert not re.search(r"/(tmp|var|home|root|Users|usr|work|private|opt)/", printed(notebook))
    assert NOTEBOOK.stat().st_size < 300_000
