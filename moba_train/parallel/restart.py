"""Ranks that torchrun restarts find each other, and not what the ranks before them left behind.

torchrun (2.11 to 2.13) hands the same key-value store to every attempt, and process groups read each other's addresses
from it. A restarted rank that is quicker than another reads the address of that one's dead predecessor and fails, as
often as it is restarted. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: on several nodes it may differ.
"""

import time
import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from moba_train.errors import LaunchError

_POLL_S = 0.05


def attempt_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The part of `store` that belongs to this attempt alone; called on every rank.

    Every process has a name that was never used before. Rank 0 gives the same token to the names it finds, and anew
    whenever one of them is replaced; all go on once every rank has confirmed the token. Raises LaunchError, on rank 0
    with the ranks that are missing, when that takes longer than `timeout`.
    """
    attempt = _lead(store, size, timeout) if rank == 0 else _follow(store, rank, timeout)
    return dist.PrefixStore(f"moba_train/attempt/{attempt}", store)


def _lead(store: dist.Store, size: int, timeout: timedelta) -> str:
    others, token = range(1, size), uuid.uuid4().hex
    names: list[bytes] | None = None
    for _ in _until(timeout):
        if store.check([_name(rank) for rank in others]):
            found = [store.get(_name(rank)) for rank in others]
            if found != names:
                names, token = found, uuid.uuid4().hex
                for name in names:
                    store.set(_token(name.decode()), token)
            if store.check([_confirmed(token, rank) for rank in others]):
                store.set(_go(token), "")
                return token
    missing = [rank for rank in others if not store.check([_name(rank)])]
    missing = missing or [rank for rank in others if not store.check([_confirmed(token, rank)])]
    raise LaunchError(
        f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {size} did not start within "
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
        f"rank {rank}: rank 0 did not bring all ranks together within {timeout.total_seconds():g} s (parallel.timeout)"
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
