"""Random layouts compute what one device does: a case in 40 of CI, or of the long form.

MOBA_LAYOUTS=500 python -m pytest -s tests/conformance/test_layouts.py      the long form, also with eight ranks
MOBA_LAYOUT='{"seed": 3, ...}' python -m pytest -s tests/conformance/test_layouts.py      one case again
"""

import os
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from moba_train.attention.registry import KINDS
from tests.conformance.faults import FAULTS
from tests.conformance.layouts import SIZES, Case, draw
from tests.conformance.running import problems_of, shrunk
from tests.run.trainer_ranks import Ranks

FULL: tuple[str, dict[str, Any]] = ("full", {})
MOBA: tuple[str, dict[str, Any]] = ("moba", {"block_size": 4, "topk": 3})
MSA = ("msa", {"block_size": 4, "topk": 3, "index_dim": 6, "train_gate": True})
ONCE_FAILED = [
    # Zero bubble, a middle part with an auxiliary loss: torch detaches a part's output in place, which was a view.
    Case(132, dict.fromkeys(SIZES, 1) | {"pp": 4, "pp_schedule": "zero_bubble"}, [FULL, MSA, FULL, FULL]),
]
"""Cases that were found by this test, made smaller."""
KDA: tuple[str, dict[str, Any]] = ("kda", {})
BARE: tuple[str, dict[str, Any]] = ("gdn", {"heads": {"keys": 2, "values": 6, "width": 4}})
OLMO = {"norms": "post", "qk_norm": "all_heads"}
_CP: dict[str, Any] = {"documents": "many", "mask": "sparse", "clip_norm": 0.05, "checkpointing": "selective"}
_IN_TWO = dict.fromkeys(SIZES, 1) | {"cp": 2, "tp": 2}
_PIPELINE = dict.fromkeys(SIZES, 1) | {"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"}
SELDOM = [
    Case(1, _IN_TWO, [MOBA, FULL], OLMO, **_CP),
    Case(2, _PIPELINE, [FULL, MOBA], OLMO | {"centered_norms": True}, documents="few"),
    Case(3, _IN_TWO, [KDA, BARE, ("gdn", {})], {"bare_layers": [1]}, **_CP),
    Case(4, _PIPELINE, [BARE, KDA], {"bare_layers": [0]}, documents="few"),
]
"""Cases of options that few of the first seeds have: norms over the heads of all ranks that share a layer, and kinds
whose parameters these ranks divide."""
COUNT = int(os.environ.get("MOBA_LAYOUTS", "40"))
AGAIN = "MOBA_LAYOUT='{}' python -m pytest -s tests/conformance/test_layouts.py"


def cases() -> list[Case]:
    """The case that is asked for, or as many as are."""
    if "MOBA_LAYOUT" in os.environ:
        return [Case.from_line(os.environ["MOBA_LAYOUT"])]
    known = [case for case in ONCE_FAILED + SELDOM if {kind for kind, _ in case.attention} <= {*KINDS}]
    most = (8, *[4] * 9) if COUNT > 40 else (2, 4)
    return known + [draw(seed, most[seed % len(most)]) for seed in range(COUNT)]


def test_random_layouts_compute_what_one_device_does(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron-LM#7452: fuzzing composed parallelism found eleven silent numeric errors."""
    drawn = cases()
    print("seeds", *(case.seed for case in drawn))
    problems = problems_of(drawn, ranks, tmp_path)
    failed = [(case, found) for case, found in zip(drawn, problems, strict=True) if found]
    report = [f"{len(failed)} of {len(drawn)} layouts differ: seeds {[case.seed for case, _ in failed]}"]
    for case, found in failed[:3]:
        smallest = shrunk(case, lambda other: any(problems_of([other], ranks, tmp_path)))
        report += [f"seed {case.seed}: {'; '.join(found[:3])}", AGAIN.format(smallest.line())]
    assert not failed, "\n".join(report)


QUICK = list(FAULTS)[:3]


@pytest.mark.skipif("msa" not in KINDS, reason="needs kinds of moba_train.mechanisms")
@pytest.mark.parametrize("fault", FAULTS if COUNT > 40 else QUICK)
def test_a_fault_on_purpose_is_found(fault: str, ranks: Ranks, tmp_path: Path) -> None:
    """In two of the first eight layouts in which it may show: documents that end on a rank hide some, masks others."""
    may_show = (case for case in (draw(seed, 2) for seed in count(step=2)) if FAULTS[fault].shows(case))
    found = (problems_of([case], ranks, tmp_path, fault)[0] for case in islice(may_show, 8))
    two = [*islice(filter(None, found), 2)]
    assert len(two) == 2, f"{fault} is not found"
    assert not any("Traceback" in first for first, *_ in two), two
