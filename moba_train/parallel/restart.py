"""A key-value store for each restart attempt of torchrun, so that ranks do not read what dead ranks left behind.

torchrun (2.11 to 2.13) hands the same store to every attempt, and process groups read the addresses of their ranks from
it. A restarted rank that is faster than another reads the address of the other's dead predecessor and fails, in every
attempt again. TORCHELASTIC_RESTART_COUNT does not identify the attempt: it may differ between nodes.
"""

import time
import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from moba_train.errors import LaunchError
from moba_train.number_ranges import named_ranks

_POLL_S = 0.05


def attempt_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A view of `store` whose keys belong to this restart attempt alone; called on every rank.

    Every process publishes a new random name. Rank 0 gives one token to all the names that it finds, and a new token
    whenever one of them is replaced; the attempt begins once every rank has confirmed the token. Raises LaunchError
    when that takes longer than `timeout`; rank 0 names the missing ranks.
    """
    attempt = _lead(store, size, timeout) if rank == 0 else _follow(store, rank, timeout)
    return dist.PrefixStore(f"moba_train/attempt/{attempt}", store)


def _lead(store: dist.Store, size: int, timeout: timedelta) -> str:
    others = range(1, size)
    token = uuid.uuid4().hex
    names: list[bytes] | None = None
    for _ in _until(timeout):
        if store.check([_name(rank) for rank in others]):
            found = store.multi_get([_name(rank) for rank in others])
            if found != names:
                names = found
                token = uuid.uuid4().hex
                for name in names:
                    store.set(_token(name.decode()), token)
            if store.check([_confirmed(token, rank) for rank in others]):
                store.set(_go(token), "")
                return token
    missing = [rank for rank in others if not store.check([_name(rank)])]
    missing = missing or [rank for rank in others if not store.check([_confirmed(token, rank)])]
    raise LaunchError(
        f"{named_ranks(missing)} of {size} did not start within "
        f"{timeout.total_seconds():g} s (parallel.timeout); look at their output"
    )


def _follow(store: dist.Store, rank: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    store.set(_name(rank), name)
    confirmed = ""
    for _ in _until(timeout):
        if store.check([_token(name)]):
            token = store.get(_token(name)).decode()
            if token != confirmed:
                store.set(_confirmed(token, rank), "")
                confirmed = token
            if store.check([_go(token)]):
                return token
    raise LaunchError(
        f"rank {rank}: rank 0 did not find all ranks within {timeout.total_seconds():g} s (parallel.timeout); look at "
        "its output"
    )


def _until(timeout: timedelta) -> Iterable[None]:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_S)


def _name(rank: int) -> str:
    return f"moba_train/name/{rank}"


def _token(name: str) -> str:
    return f"moba_train/token/{name}"


def _confirmed(token: str, rank: int) -> str:
    return f"moba_train/confirmed/{token}/{rank}"


def _go(token: str) -> str:
    return f"moba_train/go/{token}"
