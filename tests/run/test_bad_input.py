"""What a user can get wrong ends in a message that names the key or file, an exit code, and nothing half written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.run.tiny_run import Run


def _missing_data(run: Run, corpora: Path) -> str:
    run.recipe["data"]["train"][0]["path"] = str(run.folder / "nowhere")
    return "nowhere"


def _truncated_data(run: Run, corpora: Path) -> str:
    for suffix in (".bin", ".idx"):
        shutil.copy(corpora / f"one{suffix}", run.folder / f"cut{suffix}")
    os.truncate(run.folder / "cut.bin", 100)
    run.recipe["data"]["train"] = [{"path": str(run.folder / "cut")}]
    return "cut.bin"


def _small_vocabulary(run: Run, corpora: Path) -> str:
    run.recipe["model"]["vocab_size"] = 32
    return "model.vocab_size"


def _block_larger_than_sequence(run: Run, corpora: Path) -> str:
    run.recipe["attention"]["moba"]["block_size"] = 4096
    return "block_size"


def _more_ranks_than_the_layout(run: Run, corpora: Path) -> str:
    run.recipe["parallel"] = {"dp_replicate": 1, "dp_shard": 2}
    return "dp_shard"


def _batch_that_does_not_divide(run: Run, corpora: Path) -> str:
    run.recipe["batch_tokens"] = 500
    return "batch_tokens"


def _misspelt_key(run: Run, corpora: Path) -> str:
    run.recipe["optim"]["leaning_rate"] = 1.0
    return "optim.leaning_rate"


@pytest.mark.parametrize(
    "spoil",
    [
        _missing_data,
        _truncated_data,
        _small_vocabulary,
        _block_larger_than_sequence,
        _more_ranks_than_the_layout,
        _batch_that_does_not_divide,
        _misspelt_key,
    ],
)
def test_a_bad_recipe_is_refused(
    run: Run, corpora: Path, spoil: Callable[[Run, Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = spoil(run, corpora)
    assert run.train_here() == 2
    assert named in capsys.readouterr().err
    assert not (run.run_dir / "checkpoints" / "latest").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert run.train_here("--stop-at-step", "8") == 0
    newest = run.run_dir / "checkpoints" / "step_00000008"
    shard = next(newest.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)
    assert run.train_here() == 0
    assert newest.name in caplog.text
    assert any(record["step"] == 4 for record in run.records("resume"))


def test_a_changed_recipe_cannot_resume_another_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.train_here("--stop-at-step", "2") == 0
    run.recipe["stages"][0]["batch_tokens"] = 1024
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert "batch_tokens" in error
    assert "512" in error


def test_a_changed_corpus_cannot_resume_the_run(run: Run, corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run.folder / "own"
    own.mkdir()
    for file in corpora.iterdir():
        shutil.copy(file, own / file.name)
    run.recipe["data"]["train"] = [{"path": str(own / "one")}]
    assert run.train_here("--stop-at-step", "2") == 0
    for suffix in (".bin", ".idx"):
        shutil.copy(own / f"two{suffix}", own / f"one{suffix}")
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert str(own / "one") in error
    assert "changed" in error


def test_the_report_of_plain_torchrun_ends_with_the_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank leaves the message for torchrun, also one that prints nothing itself: the report ends with the rank
    that failed first, which may be any."""
    failures = {}
    for rank in (0, 1):
        file = run.folder / f"error{rank}.json"
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert run.train_here("seed=-1", "micro_batch_size=0") == 2
        failures[rank] = ProcessFailure(rank, 100 + rank, 2, str(file))
    report = str(ChildFailedError("moba_train.train", failures)).rstrip("=\n").splitlines()
    assert report[-3:] == [
        "  traceback : error: 2 problems in the configuration:",
        "    - seed: given -1; allowed: integer >= 0 and < 2147483648",
        "    - micro_batch_size: given 0; allowed: integer >= 1",
    ]
    assert not any("enable traceback" in line for line in report)


@pytest.mark.parametrize(
    ("argument", "named"),
    [("--stop-at-step=0", "--stop-at-step: given '0'; allowed: a step"), ("--verbos=1", "--verbos")],
)
def test_a_wrong_argument_is_an_error_like_any_other(
    run: Run, argument: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train_here(argument) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert named in printed
    assert "usage" not in printed


def test_a_run_folder_that_cannot_be_made_is_refused(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    (run.folder / "file").write_text("in the way")
    run.recipe["run_dir"] = str(run.folder / "file" / "run")
    assert run.train_here() == 2
    output = "".join(capfd.readouterr())
    assert "run_dir" in output
    assert "Traceback" not in output
