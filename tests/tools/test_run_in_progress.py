"""Commands read a checkpoint to the end although the run that saved it goes on and would remove it."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moba_train.checkpoint import manifest
from moba_train.checkpoint.retention import Retention
from moba_train.strict_json import from_json
from moba_train.tools.cli import app
from tests.commands import run_app
from tests.forked_program import ForkedProgram
from tests.run.tiny_run import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """A run with checkpoints of steps 4, 8 and 12."""
    run = Run(tmp_path_factory.mktemp("trained"), corpora)
    run.recipe["checkpoint"]["keep_last"] = 3
    assert run.train_here() == 0
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "CHECKPOINT"],
        ["convert", "moba-to-hf", "CHECKPOINT", "OUTPUT"],
        ["compare", "CHECKPOINT", "CHECKPOINT"],
        ["verify", "CHECKPOINT"],
    ],
    ids=lambda command: command[0],
)
def test_what_is_read_stays_until_it_has_been_read(
    command: list[str], trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tmp_path)
    run.take_over(trained, 12)
    folder = run.run_dir / "checkpoints"
    asked = folder / "step_00000008"
    read_manifest = manifest.read_manifest
    applied: list[bool] = []

    def as_training_saves(*arguments: Any) -> Any:
        files = read_manifest(*arguments)
        if not applied:
            applied.append(True)
            Retention(keep_last=1).apply(folder)
            assert not (folder / "step_00000004").exists()
        return files

    monkeypatch.setattr(manifest, "read_manifest", as_training_saves)
    words = {"CHECKPOINT": str(asked), "OUTPUT": str(tmp_path / "hf")}
    done = CliRunner().invoke(app, [words.get(word, word) for word in command])
    assert (done.exit_code, done.exception) == (0, None), done.output
    assert applied
    Retention(keep_last=1).apply(folder)
    assert [path.name for path in folder.glob("step_*")] == ["step_00000012"]


def test_ranks_evaluate_one_checkpoint_although_each_finds_another(trained: Run, tmp_path: Path) -> None:
    """As when the run saves while they look."""
    (tmp_path / "find.py").write_text(
        "import os, sys\n"
        "from moba_train.checkpoint import publish\n"
        "from moba_train.tools import saved_recipe\n"
        "from moba_train.tools.cli import app\n"
        "step = 8 + 4 * int(os.environ['RANK'])\n"
        "found = publish.find_checkpoint\n"
        "saved_recipe.find_checkpoint = lambda path: found(path / f'checkpoints/step_{step:08d}')\n"
        "app(sys.argv[1:])\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "find.py")]
    program = ForkedProgram([*torchrun, "eval", str(trained.run_dir), "--output", str(tmp_path)], tmp_path / "output")
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    run_app(app, "eval", trained.run_dir / "checkpoints/step_00000008", "--output", tmp_path / "alone")
    ours, theirs = (from_json((folder / "evaluation.json").read_text()) for folder in (tmp_path, tmp_path / "alone"))
    assert ours["step"] == theirs["step"] == 8
    assert ours["numbers"] == pytest.approx(theirs["numbers"], rel=1e-5)
