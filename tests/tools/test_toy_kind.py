"""Commands on a run whose attention kind has parameters, which is registered in this process alone."""

from pathlib import Path

import pytest
import torch

from moba_train.tools.cli import app
from tests.commands import run_app
from tests.run.test_toy_kind import finished, own_ranks, registered
from tests.run.tiny_run import Run

__all__ = ["finished", "own_ranks", "registered"]


def test_evaluation_repeats_the_runs_own_number(finished: Run) -> None:
    output = run_app(app, "eval", finished.run_dir).output
    (line,) = [line for line in output.splitlines() if line.startswith("moba+toy")]
    assert float(line.split()[3]) == pytest.approx(finished.records("validation_loss")[-1]["eval_loss"], abs=1e-3)


def test_generation_decodes_through_the_cache(finished: Run) -> None:
    """Token by token what one pass over the whole text predicts."""
    from moba_train.attention.layout import packed_layout
    from moba_train.tools.inference.generate import generate
    from moba_train.tools.saved_recipe import load_trained, open_checkpoint

    model = load_trained(open_checkpoint(finished.run_dir), torch.device("cpu"), torch.float64)
    prompt = list(range(1, 40))
    answer = list(generate(model, prompt, 8, temperature=0.0, decode="own"))
    text = torch.tensor(prompt + answer)
    with torch.no_grad():
        logits = model(text, torch.arange(len(text)), packed_layout([len(text)]))
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer


def test_export_is_refused_with_what_would_be_lost(finished: Run, tmp_path: Path) -> None:
    output = run_app(app, "convert", "moba-to-hf", finished.run_dir, tmp_path / "out", code=2).output
    assert "kind 'toy' has 132 parameters in a layer" in output
    assert not (tmp_path / "out").exists()
