"""Memory of the loss: what the program predicts is what is held, and loss tokens, not tokens, decide it."""

import pytest
import torch

from benchmarks import loss_memory
from benchmarks.loss_memory import measure, predicted_bytes
from moba_train.model import loss

TOKENS, VOCAB, WIDTH = 1024, 1024, 32


@pytest.mark.parametrize("rows", [10, 100, 1024])
def test_the_peak_is_the_predicted_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss token in a hundred, in ten, and all in four chunks."""
    for module in (loss, loss_memory):
        monkeypatch.setattr(module, "chunk_tokens", lambda _: 256)
    with torch.backends.mkldnn.flags(enabled=False):  # on some processors it packs operands anew
        measured = measure(TOKENS, rows, VOCAB, WIDTH, torch.device("cpu"))
    assert measured == pytest.approx(predicted_bytes(TOKENS, rows, VOCAB, WIDTH), rel=0.05)


def test_one_loss_token_in_a_hundred_takes_a_hundredth_of_the_logits() -> None:
    measured = measure(TOKENS, 10, VOCAB, WIDTH, torch.device("cpu"))
    assert measured < loss_memory.logits_bytes(TOKENS, VOCAB) / 20
