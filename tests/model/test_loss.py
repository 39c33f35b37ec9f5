"""The loss sum: cross entropy on rows with loss, in chunks, defined without any."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from moba_train.model import loss as loss_module
from moba_train.model.loss import CompiledChunkLoss, weighted_loss_sum

T, D, V = 23, 8, 31


@pytest.fixture
def case(device):
    """hidden, weight, and (labels, index, weights) of 11 of 23 rows."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(device).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(device).requires_grad_()
    index = torch.randperm(T, generator=generator)[:11].sort().values.to(device)
    labels = torch.randint(V, (11,), generator=generator).to(device)
    weights = torch.rand(11, generator=generator).to(device)
    return hidden, weight, labels, index, weights


def plain(hidden, weight, labels, index, weights):
    return (F.cross_entropy((hidden @ weight.T)[index], labels, reduction="none") * weights).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 11, 12, 4096])
def test_loss_and_gradients_equal_cross_entropy_whatever_the_chunk(case, chunk_tokens, monkeypatch):
    """Chunks that end one before, at and one behind the last row included."""
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk_tokens)
    got, want = weighted_loss_sum(*case), plain(*case)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(got, case[:2]), torch.autograd.grad(want, case[:2]), rtol=1e-5, atol=1e-5
    )


def test_bf16_logits_are_reduced_in_float32(case):
    hidden, weight, *loss_on = case
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got = weighted_loss_sum(hidden, weight, *loss_on)
    logits = F.linear(hidden, weight).double()
    want = (F.cross_entropy(logits[loss_on[1]], loss_on[0], reduction="none") * loss_on[2]).sum()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


def test_a_row_that_is_listed_twice_counts_twice(case):
    hidden, weight, labels, index, weights = case
    twice = weighted_loss_sum(hidden, weight, labels.repeat(2), index.repeat(2), weights.repeat(2))
    torch.testing.assert_close(twice, 2 * plain(*case), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 11])
def test_no_weight_gives_zero_loss_and_zero_gradients(case, rows):
    """A rank without loss tokens (none listed, or padding of weight 0) still joins the backward pass, without NaN."""
    hidden, weight, labels, index, weights = case
    total = weighted_loss_sum(hidden, weight, labels[:rows], index[:rows], torch.zeros_like(weights[:rows]))
    assert total.item() == 0
    for grad in torch.autograd.grad(total, (hidden, weight)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_the_compiled_loss_has_two_forms_whatever_the_rows(device, monkeypatch):
    """The first chunk is complete or not: the bits are the same, so that a run can be resumed. Without loss, too."""
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 8)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=generator).to(device) for rows in (T, V))
    labels, weights = torch.randint(V, (T,), generator=generator).to(device), torch.rand(T).to(device)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def gradients(rows, *of_chunk):
        index = torch.arange(T - rows, T, device=device)
        total = weighted_loss_sum(*leaves, labels[:rows], index, weights[:rows], *of_chunk)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    found = []
    for numbers in ([23, 8, 3, 16, 1, 0, 9, 15], [15, 3, 9, 0, 1, 16, 8, 23]):
        torch.compiler.reset()
        backend = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
        compiled = CompiledChunkLoss(backend=backend)
        found.append({rows: gradients(rows, compiled) for rows in numbers})
        assert backend.frame_count == 2
    for rows, got in found[0].items():
        assert all(map(torch.equal, got, found[1][rows])), rows
        torch.testing.assert_close(got, gradients(rows), rtol=1e-5, atol=1e-5)
