"""Ranks of one attempt get a store of their own, whatever earlier attempts have left in the common one."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from moba_train.errors import CommunicationError
from moba_train.parallel.world import attempt_store

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.2)


def join(
    store: dist.Store, ranks: list[int], timeout: timedelta, size: int = 3
) -> list[dist.Store | CommunicationError]:
    def one(rank: int) -> dist.Store | CommunicationError:
        try:
            return attempt_store(store, rank, size, timeout)
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def joined(store: dist.Store, ranks: list[int], timeout: timedelta) -> list[dist.Store]:
    """The stores of ranks all of which meet."""
    outcomes = join(store, ranks, timeout)
    stores = [outcome for outcome in outcomes if not isinstance(outcome, CommunicationError)]
    assert len(stores) == len(outcomes), outcomes
    return stores


def test_every_attempt_sees_its_own_keys_only() -> None:
    common = dist.HashStore()
    for attempt in range(3):
        stores = joined(common, [0, 1, 2], LONG)
        assert not stores[1].check(["address"]), "left behind by an earlier attempt"
        stores[0].set("address", str(attempt))
        assert [store.get("address") for store in stores] == [str(attempt).encode()] * 3


def test_attempts_that_failed_half_way_do_not_confuse_the_next() -> None:
    """Ranks that died before, during and after the meeting, rank 0 among them."""
    common = dist.HashStore()
    for present in ([1, 2], [0, 1], [0], [2]):
        assert all(isinstance(outcome, CommunicationError) for outcome in join(common, present, SHORT))
    stores = joined(common, [0, 1, 2], LONG)
    stores[2].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3


def test_rank_0_names_who_is_missing() -> None:
    outcome = join(dist.HashStore(), [0, 1], SHORT)[0]
    assert isinstance(outcome, CommunicationError)
    assert "rank 2 of 3 did not start" in str(outcome)
    assert "parallel.timeout" in str(outcome)
