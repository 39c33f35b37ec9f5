"""Context parallelism between GPUs over NCCL: the checks of the CPU with kernels, longer sequences and random sizes.

python -m pytest -s tests/parallel/context/test_context_gpu.py          # all GPUs, up to 4; -s: seconds of each check
MOBA_RANKS=8 python -m pytest tests/parallel/context/test_context_gpu.py    # on fewer GPUs: NCCL sees several hosts
MOBA_SOAK=200 python -m pytest tests/parallel/context/test_context_gpu.py -k soak

Strategies of fewer ranks than there are run with MOBA_RANKS=2 and 3: every length of a shard is compiled anew. Two of
them run in any case, in two groups side by side, and with padding and a rank that has no part in it.
"""

import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moba_train.parallel.context.strategy import CPStrategy
from moba_train.registry import TRANSPORTS
from tests.parallel.context.context_cases import Case
from tests.parallel.context.context_ranks import Check, Member, equal_to_one_device, run_checks, say

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 and "MOBA_RANKS" not in os.environ, reason="needs two GPUs, or MOBA_RANKS"
    ),
    pytest.mark.timeout(1200),
]
WORLD = int(os.environ.get("MOBA_RANKS", 4 if torch.cuda.device_count() >= 4 else 2))
BIG = Case((3000, 0, 1, 5191), 16, 4, block_size=128, topk=4, dtype=torch.bfloat16, backend="auto", head_dim=128)
CASES = {
    "MoBA": BIG,
    "MoBA, blocks longer than shards": replace(BIG, block_size=2048, topk=2),
    "dense": replace(BIG, topk=None),
}
STRATEGIES = {
    f"{transport}, {layout}, {WORLD} ranks": CPStrategy(
        WORLD, transport, layout, node, slices=4 if layout == "contiguous" else 1
    )
    for layout in ("contiguous", "zigzag")
    for transport, node in (
        ("allgather", WORLD),
        ("ring", WORLD),
        *([("dispatch", WORLD)] if "dispatch" in TRANSPORTS else []),
        *([("ulysses", WORLD)] if BIG.heads % WORLD == 0 else []),
        *([("hierarchical", WORLD // 2)] if WORLD in (4, 8) else []),
    )
}
STRATEGIES["ring in parts, zigzag, 2 ranks"] = CPStrategy(2, "ring", "zigzag", 1)
if WORLD == 4:
    STRATEGIES["allgather, contiguous, 3 ranks"] = CPStrategy(3, "allgather", "contiguous", 3, slices=4)
    STRATEGIES["ring, zigzag, 4 ranks, 2 buffers"] = CPStrategy(4, "ring", "zigzag", 4, 2)
if WORLD in (4, 8):
    STRATEGIES[f"ring in parts, zigzag, {WORLD} ranks"] = CPStrategy(WORLD, "ring", "zigzag", WORLD // 2)
CHECKS: dict[str, Check] = {
    f"{name}, {how}": partial(equal_to_one_device, case, strategy)
    for how, strategy in STRATEGIES.items()
    for name, case in CASES.items()
}


SOAKED = [(64, 8), (128, 3), (512, 1), (128, None)]
"""Block sizes and blocks selected: few, as kernels are compiled for each."""


def soak(member: Member) -> None:
    """Engines stay, as in training, while sequence lengths and documents change."""
    rng = random.Random(0)
    engines = {name: member.engine(strategy) for name, strategy in STRATEGIES.items() if strategy.ranks == WORLD}
    for step in range(int(os.environ.get("MOBA_SOAK", "10"))):
        name = rng.choice(list(engines))
        lengths = [rng.randint(0, 1000) for _ in range(rng.randint(1, 5))] + [rng.randint(WORLD, 1000)]
        block_size, topk = rng.choice(SOAKED)
        case = replace(BIG, lengths=tuple(lengths), block_size=block_size, topk=topk)
        began = time.perf_counter()
        try:
            equal_to_one_device(case, STRATEGIES[name], member, engines[name])
        except AssertionError as error:
            raise AssertionError(f"step {step}: {name}, {case}") from error
        say(f"soak, step {step}: {name}, {time.perf_counter() - began:.1f} s")


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of the selected checks: `-k ring` runs only those."""
    functions = (item for item in request.session.items if isinstance(item, pytest.Function))
    selected = {item.callspec.params["check"] for item in functions if item.function is test_between_gpus}
    checks = {name: check for name, check in CHECKS.items() if name in selected}
    return run_checks(WORLD, checks, tmp_path_factory.mktemp("context"), "cuda")


@pytest.mark.parametrize("check", CHECKS)
def test_between_gpus(check: str, errors: dict[str, str]) -> None:
    assert check not in errors, errors[check]


def test_soak(tmp_path: Path) -> None:
    errors = run_checks(WORLD, {"soak": soak}, tmp_path, "cuda")
    assert errors == {}, errors.get("soak")
