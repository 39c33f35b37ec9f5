"""The LocalAttention contract for the kinds of mechanisms that are one engine call, and for the attentions that kinds
with several calls are made of."""

import pytest

from tests.attention import test_local_attention as core
from tests.attention.test_local_attention import (  # noqa: F401
    pytest_generate_tests,
    qkv,
    test_a_query_that_sees_none_of_the_given_keys_gives_zero_and_minus_infinity,
    test_gradients_are_the_derivatives,
    test_gradients_over_disjoint_keys_with_the_merged_results_sum_to_the_whole,
    test_key_value_heads_may_be_split_as_well,
    test_merged_results_over_disjoint_keys_are_the_result_over_all,
    test_queries_and_keys_may_both_be_split,
    test_queries_may_be_split_as_well,
    test_query_heads_that_are_not_coupled_may_be_split,
    test_results_have_the_inputs_dtype_and_lse_is_float32_or_better,
    test_summaries_of_aligned_shards_add_up_to_the_summary_of_the_sequence,
    whole,
)

# Sizes as in the core's file.
CASES = [
    pytest.param(
        "infllm_v2",
        {"block_size": 4, "topk": 3, "local_blocks": 1, "window": 4, "stride": 2, "dense_len": 1},
        id="infllm_v2",
    ),
    pytest.param("moa", {"alpha": 5, "beta": 0.25, "sink_tokens": 3, "block_size": 4, "max_length": 256}, id="moa"),
    pytest.param("moba_v1", {"block_size": 4, "topk": 3}, id="moba_v1"),
    pytest.param("moba_v1", {"block_size": 4, "topk": 3, "merge": "gate"}, id="moba_v1 gate"),
    pytest.param("moba_v1", {"block_size": 4, "topk": 3, "merge": "softmax"}, id="moba_v1 softmax"),
    pytest.param("moba_window", {"block_size": 4, "topk": 2, "window": 8}, id="moba_window"),
    pytest.param("window", {"window": 5}, id="window"),
    pytest.param("window", {"window": 5, "sinks": 3}, id="window and sinks"),
    pytest.param("window", {"window": 100}, id="window-of-all"),
]


def test_every_registered_kind_with_one_call_is_tested() -> None:
    assert {case.values[0] for case in [*core.CASES, *CASES]} == {*core.ONE_CALL}
