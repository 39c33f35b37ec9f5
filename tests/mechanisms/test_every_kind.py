"""The checks that every kind of mechanisms must pass (tests/attention/kind_checks.py), case by case: ranks that share a
sequence compute what one device does, packed documents do not see each other, new tokens are decoded as trained.

A kind's own file compares one device with its oracle. Its cases for these checks are lines here.
"""

from typing import Any, NamedTuple

import pytest

from moba_train.attention.registry import KINDS
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    RING_IN_PARTS,
    STRATEGIES,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    make_layer,
)
from tests.mechanisms import (
    test_by_group,
    test_capped,
    test_distilled_gates,
    test_gdn,
    test_indexers,
    test_infllm,
    test_infllm_v2,
    test_moa,
    test_moba_window,
    test_nsa,
    test_oracle,
    test_window,
)
from tests.tools.decoding_checks import assert_decodes_like_training

LENGTHS = [12, 0, 1, 27]
NINE = [9]
"""On four ranks 3, 3, 3 and none."""
FEW = [NINE, [2, 1, 1, 1, 1, 1, 1, 1], [40, 3]]
BLOCKS = {"block_size": 4, "topk": 3}
GATES = test_distilled_gates.CASES | test_indexers.CASES


class Case(NamedTuple):
    """A kind with its options, and the documents of the sequences that ranks share; the first one is packed as well."""

    kind: str
    options: dict[str, Any]
    sequences: list[list[int]]
    strategies: list[CPStrategy] = STRATEGIES
    atol: float = 1e-11


# Partial results of a ring that attends to some ranks' keys at a time are merged, as sums of softmaxes cannot be.
AT_ONCE = [strategy for strategy in STRATEGIES if strategy != RING_IN_PARTS]
CASES: dict[str, Case] = {
    **{f"by_group {name}": Case("by_group", case, [LENGTHS]) for name, case in test_by_group.CASES.items()},
    **{f"capped {case}": Case("capped", case, [[29, 0, 1, 34]]) for case in test_capped.CASES},
    **{name: Case(*case, [LENGTHS, NINE]) for name, case in GATES.items()},
    "gdn": Case("gdn", {}, [[21, 0, 1, 42]], STRATEGIES[:4:3], 1e-10),
    "gdn own heads": Case("gdn", test_gdn.OWN, [[21, 0, 1, 42]], STRATEGIES[3:4], 1e-10),
    "infllm_v2": Case("infllm_v2", test_infllm_v2.SIZES | {"dense_len": 40}, [test_infllm_v2.LENGTHS]),
    "kda": Case("kda", {}, [LENGTHS, [40], *FEW], atol=1e-10),
    "lightning": Case("lightning", {}, [LENGTHS]),
    "lightning geometric": Case("lightning", {"decay": "geometric"}, [LENGTHS, [1, 2, 3], *FEW]),
    **{f"moa {name}": Case("moa", case, [test_moa.LENGTHS, NINE]) for name, case in test_moa.CASES.items()},
    "moba_v05": Case("moba_v05", BLOCKS, [LENGTHS, NINE], AT_ONCE),
    **{f"moba_v1 {merge}": Case("moba_v1", BLOCKS | {"merge": merge}, [LENGTHS], AT_ONCE) for merge in ("sum", "gate")},
    "moba_window": Case("moba_window", test_moba_window.SIZES, [test_moba_window.LENGTHS]),
    "nsa": Case("nsa", test_nsa.SMALL, [test_nsa.LENGTHS, NINE]),
    **{f"oracle {name}": Case("oracle", test_oracle.CASES[name], [LENGTHS]) for name in ("head", "tokens of a group")},
    **{f"window {case}": Case("window", case, [test_window.LENGTHS]) for case in test_window.CASES},
}
PACKED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    **{name: (case.kind, case.options, case.sequences[0]) for name, case in CASES.items()},
    **{
        f"infllm_v2, dense to {length}": (
            "infllm_v2",
            test_infllm_v2.SIZES | {"dense_len": length, "backend": "reference"},
            test_infllm_v2.LENGTHS,
        )
        for length in (1, 44)
    },
    **{f"oracle {name}": ("oracle", case, LENGTHS) for name, case in test_oracle.CASES.items()},
}
INFLLM_V2 = {"block_size": 4, "topk": 3, "local_blocks": 1, "window": 4, "stride": 2}
DECODED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{
        f"by_group {name}": ("by_group", test_by_group.CASES[name], {"steps": 4})
        for name in ("moba and full", "msa and a window", "key convolutions")
    },
    **{f"capped {case}": ("capped", case, {}) for case in test_capped.CASES},
    **{name: (*GATES[name], {}) for name in ("msa sparse", "msa, keys of groups", "msa warmup", "seer warmup")},
    **{name: (*GATES[name], {}) for name in ("qsa sparse", "qsa warmup", "tokens", "all")},
    "gdn": ("gdn", {}, {}),
    "gdn own heads": ("gdn", test_gdn.OWN, {}),
    "infllm": ("infllm", test_infllm.SIZES, {"prompts": (25, 7), "steps": 8}),
    "infllm, a prompt within the window": (
        "infllm",
        test_infllm.SIZES | {"window": 40},
        {"steps": 4, "decode": "full"},
    ),
    # Also texts that grow beyond dense_len, in the prompt and after it.
    **{
        f"infllm_v2, dense to {length}": (
            "infllm_v2",
            INFLLM_V2 | {"dense_len": length},
            {"prompts": (21, 13), "steps": 6},
        )
        for length in (1, 17)
    },
    "kda": ("kda", {}, {}),
    "kda, prompts shorter than a convolution": ("kda", {}, {"prompts": (2, 3, 7), "steps": 4}),
    **{f"moa {name}": ("moa", case, {"prompts": (31, 5)}) for name, case in test_moa.CASES.items()},
    "moba_window": ("moba_window", test_moba_window.SIZES | {"topk": 2}, {"prompts": (21, 13), "steps": 6}),
    "nsa": ("nsa", test_nsa.SMALL, {"prompts": (33, 5)}),
    # Its selected branch then attends to all tokens, which it does anyway if every block is selected.
    "nsa, all blocks": ("nsa", test_nsa.SMALL | {"topk": 64}, {"decode": "full"}),
    **{f"oracle {name}": ("oracle", case, {"steps": 4}) for name, case in test_oracle.CASES.items()},
    **{f"window {case}": ("window", case, {"prompts": (31, 5)}) for case in test_window.CASES},
    # `decode: full` replaces attentions that full attention is a limit of: sums and states go on as trained.
    **{
        f"{name}, decode {decode}": (CASES[name].kind, CASES[name].options, {"decode": decode})
        for name in ("lightning", "lightning geometric", "moba_v05", "moba_v1 sum", "moba_v1 gate")
        for decode in ("own", "full")
    },
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, id=f"{name}, {strategy}")
        for name, case in CASES.items()
        for strategy in case.strategies
    ],
)
def test_ranks_that_share_a_sequence_are_one_device(name: str, strategy: CPStrategy) -> None:
    """Also where shards begin and end inside blocks and units, and where a rank has no tokens at all."""
    case = CASES[name]
    for lengths in case.sequences:
        assert_ranks_equal_one_device(make_layer(case.kind, case.options, lengths), strategy, case.atol)


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_what_they_are_alone(name: str) -> None:
    assert_documents_are_independent(*PACKED[name])


@pytest.mark.parametrize("name", DECODED)
def test_new_tokens_are_decoded_as_trained(name: str) -> None:
    kind, options, texts = DECODED[name]
    assert_decodes_like_training(kind, options, **texts)


def test_every_kind_has_its_cases() -> None:
    kinds = {name for name, kind in KINDS.items() if kind.__module__.startswith("moba_train.mechanisms.")}
    assert kinds == {kind for kind, *_ in DECODED.values()}
    # A layer of `infllm` has no gradients: its own file compares the outputs of ranks and of documents.
    assert kinds - {"infllm"} == {case.kind for case in CASES.values()}
