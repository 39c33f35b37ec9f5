"""Memory of the loss: what the program predicts is what is held, and loss tokens, not tokens, decide it."""

from functools import partial

import pytest
import torch

from benchmarks import loss_memory
from benchmarks.loss_memory import measure, predicted_bytes
from moba_train.memory.moments import bytes_per_logit
from moba_train.model import loss
from tests.memory.test_memory import FULL, config
from tests.resolved import setup_of

TOKENS, VOCAB, WIDTH = 1024, 1024, 32


@pytest.mark.parametrize("rows", [10, 100, 1024])
def test_the_peak_is_the_predicted_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss token in a hundred, in ten, and all in four chunks."""
    for module in (loss, loss_memory):
        monkeypatch.setattr(module, "chunk_tokens", lambda _: 256)
    with torch.backends.mkldnn.flags(enabled=False):  # on some processors it packs operands anew
        measured = measure(TOKENS, rows, VOCAB, WIDTH, torch.device("cpu"))
    assert measured == pytest.approx(predicted_bytes(TOKENS, rows, VOCAB, WIDTH), rel=0.05)


def test_a_cap_keeps_a_float_more_of_each_logit_as_the_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    computation = setup_of(config("llama-1b", "8K", FULL, batch_tokens="8K")).computation
    counted = bytes_per_logit(computation, is_capped=True) - bytes_per_logit(computation)
    plain = measure(TOKENS, TOKENS, VOCAB, WIDTH, torch.device("cpu"))
    capped = partial(loss.weighted_loss_sum, of_chunk=partial(loss.chunk_loss, cap=30.0))
    monkeypatch.setattr(loss_memory, "weighted_loss_sum", capped)
    more = measure(TOKENS, TOKENS, VOCAB, WIDTH, torch.device("cpu")) - plain
    assert more == pytest.approx(counted * TOKENS * VOCAB, rel=0.05)


def test_one_loss_token_in_a_hundred_takes_a_hundredth_of_the_logits() -> None:
    measured = measure(TOKENS, 10, VOCAB, WIDTH, torch.device("cpu"))
    assert measured < loss_memory.logits_bytes(TOKENS, VOCAB) / 20
