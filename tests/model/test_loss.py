"""The loss sum: cross entropy on rows with loss, in chunks, defined without any."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from moba_train.model import loss as loss_module
from moba_train.model.loss import (
    CHUNK_LOGITS,
    CHUNK_TOKENS,
    MOST_CHUNK_TOKENS,
    CompiledChunkLoss,
    chunk_tokens,
    weighted_loss_sum,
)

T, D, V = 23, 8, 31


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def case(device: torch.device | str) -> Case:
    """hidden, weight, and (labels, index, weights) of 11 of 23 rows."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(device).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(device).requires_grad_()
    index = torch.randperm(T, generator=generator)[:11].sort().values.to(device)
    labels = torch.randint(V, (11,), generator=generator).to(device)
    weights = torch.rand(11, generator=generator).to(device)
    return hidden, weight, labels, index, weights


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return (F.cross_entropy((hidden @ weight.T)[index], labels, reduction="none") * weights).sum()


@pytest.mark.parametrize("rows", [1, 3, 10, 11, 12, 4096])
def test_loss_and_gradients_equal_cross_entropy_whatever_the_chunk(
    case: Case, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end one before, at and one behind the last row included."""
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda _: rows)
    got, want = weighted_loss_sum(*case), plain(*case)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(got, case[:2]), torch.autograd.grad(want, case[:2]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("vocab_size", "tokens"),
    [(256, 32_768), (8192, 32_768), (8193, 16_384), (16_384, 16_384), (32_000, 8192), (65_536, 4096), (151_936, 4096)],
)
def test_a_chunk_has_more_tokens_where_the_vocabulary_is_small(vocab_size: int, tokens: int) -> None:
    assert chunk_tokens(vocab_size) == tokens
    assert tokens in {CHUNK_TOKENS, MOST_CHUNK_TOKENS} or tokens * vocab_size <= CHUNK_LOGITS < 2 * tokens * vocab_size


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("hidden_trained", "weight_trained"), [(True, True), (True, False), (False, True)])
def test_logits_are_computed_once_and_only_the_gradients_that_are_needed(
    case: Case, hidden_trained: bool, weight_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda _: 6)
    hidden, weight, labels, index, weights = case
    hidden.requires_grad_(hidden_trained)
    weight.requires_grad_(weight_trained)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    expected = torch.autograd.grad(plain(*case), leaves)
    with Products() as products:
        got = torch.autograd.grad(weighted_loss_sum(hidden, weight, labels, index, weights), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert products.count == 2 * (1 + len(leaves))  # two chunks


def test_without_gradients_only_the_loss_is_computed(case: Case) -> None:
    with torch.no_grad(), Products() as products:
        total = weighted_loss_sum(*case)
    torch.testing.assert_close(total, plain(*case).detach(), rtol=1e-6, atol=1e-5)
    assert products.count == 1


def test_gradients_of_activations_and_of_weights_can_be_taken_apart(case: Case) -> None:
    """As a pipeline that splits the backward pass does."""
    total = weighted_loss_sum(*case) / 7
    expected = [gradient / 7 for gradient in torch.autograd.grad(plain(*case), case[:2])]
    for leaf, gradient in zip(case[:2], expected, strict=True):
        (got,) = torch.autograd.grad(total, leaf, retain_graph=True)
        torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)


def test_bf16_logits_are_reduced_in_float32(case: Case) -> None:
    hidden, weight, labels, index, weights = case
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got = weighted_loss_sum(hidden, weight, labels, index, weights)
    logits = F.linear(hidden, weight).double()
    want = (F.cross_entropy(logits[index], labels, reduction="none") * weights).sum()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


def test_a_row_that_is_listed_twice_counts_twice(case: Case) -> None:
    hidden, weight, labels, index, weights = case
    twice = weighted_loss_sum(hidden, weight, labels.repeat(2), index.repeat(2), weights.repeat(2))
    torch.testing.assert_close(twice, 2 * plain(*case), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 11])
def test_no_weight_gives_zero_loss_and_zero_gradients(case: Case, rows: int) -> None:
    """A rank without loss tokens (none listed, or padding of weight 0) still joins the backward pass, without NaN."""
    hidden, weight, labels, index, weights = case
    total = weighted_loss_sum(hidden, weight, labels[:rows], index[:rows], torch.zeros_like(weights[:rows]))
    assert total.item() == 0
    for grad in torch.autograd.grad(total, (hidden, weight)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_the_compiled_loss_is_the_same_and_compiled_for_few_sizes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are filled up to a power of two, and to an eighth of the smallest chunk; none at all, too."""
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda _: 16)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(rows, D, generator=generator).to(device).requires_grad_() for rows in (T, V)]
    hidden, weight = leaves
    labels, weights = torch.randint(V, (T,), generator=generator).to(device), torch.rand(T).to(device)

    def gradients(rows: int, *of_chunk: Any) -> list[torch.Tensor]:
        index = torch.arange(T - rows, T, device=device)
        total = weighted_loss_sum(hidden, weight, labels[:rows], index, weights[:rows], *of_chunk)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    backend = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
    compiled = CompiledChunkLoss(backend=backend)
    for rows in (23, 15, 16, 0, 5, 7):
        torch.testing.assert_close(gradients(rows, compiled), gradients(rows), rtol=1e-5, atol=1e-5)
    assert backend.frame_count == 3  # 16, 8 and 2 rows
