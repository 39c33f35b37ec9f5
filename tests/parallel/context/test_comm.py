"""Which of torch's calls the communicator makes; what they do is tested with real ranks (test_context_gloo.py)."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.errors import CommunicationError
from moba_train.parallel.context.comm import Communicator


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    """A communicator of rank 0 of 2, over torch's fake process group: its calls return at once, and nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield Communicator(dist.group.WORLD, torch.device("cpu"))
    dist.destroy_process_group()


def test_an_exchange_sends_no_messages(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory torch holds back on a GPU: 38 GiB in training at 128K tokens (benchmarks/LOG.md)."""
    calls: list[str] = []
    for name in ("batch_isend_irecv", "isend", "irecv", "all_to_all_single"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    received = communicator.all_to_all(torch.zeros(4, 3), torch.ones(2, 5)).wait()
    assert [tuple(x.shape) for x in received] == [(4, 3), (2, 5)]
    assert calls == ["all_to_all_single"] * 2


def test_a_call_that_fails_is_named_with_the_ranks_by_their_numbers_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no answer")

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        communicator = Communicator(dist.new_group([2, 3]), torch.device("cpu"))
        monkeypatch.setattr(dist, "all_to_all_single", fail)
        words = r"rank 3 gave up after \d+\.\d s in all_to_all with ranks \[2, 3\], tensors \[\(4, 5\)\]: no answer"
        with pytest.raises(CommunicationError, match=words):
            communicator.all_to_all(torch.zeros(4, 5))
    finally:
        dist.destroy_process_group()
