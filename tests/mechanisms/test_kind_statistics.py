"""Statistics that kinds of mechanisms show: gates in their warm-up, states behind documents, shares of keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.mechanisms.linear import delta
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import Layer, run_layer
from tests.attention.test_kind_statistics import LENGTHS, seen, seen_by_ranks, small_layer


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
@pytest.mark.parametrize("name", ["seer", "msa"])
def test_what_a_gate_would_select_is_seen_in_its_warm_up(name: str, mode: str) -> None:
    found = seen(small_layer(name, LENGTHS, mode=mode))
    assert 0 < found["key_share"] < 1
    assert found["entropy"] == pytest.approx(seen(small_layer(name, LENGTHS))["entropy"])


def naive_state(layer: Layer) -> Tensor:
    """The state behind the last token, [H, d, d], token by token; `lightning` with `decay: geometric`."""
    states: list[Any] = []
    if layer.kind.name == "kda":
        patch = pytest.MonkeyPatch()
        rule = delta.delta_attention

        def noted(*arguments: Any) -> Any:
            states.append(rule(*arguments))
            return states[-1]

        patch.setattr("moba_train.mechanisms.linear.kda.delta_attention", noted)
        with patch.context(), torch.no_grad():
            run_layer(layer)
        patch.undo()
        return states[-1][1][-1]
    assert layer.parameters is not None
    state = torch.zeros(4, 8, 8, dtype=torch.float64)
    decay = layer.parameters.log_decays[1].exp()[:, None, None]
    last = slice(layer.layout.edges[-2], None)
    k, v = (x.detach()[last].repeat_interleave(2, 1) for x in (torch.nn.functional.silu(layer.k), layer.v))
    for k_Hd, v_Hd in zip(k, v, strict=True):
        state = decay * state + k_Hd[:, :, None] * v_Hd[:, None]
    return state


@pytest.mark.parametrize("lengths", [[41], [30, 11]], ids=["began on the first rank", "begins on the last rank"])
@pytest.mark.parametrize(("name", "options"), [("kda", {}), ("lightning", {"decay": "geometric"})])
def test_the_state_behind_a_document_is_the_same_on_ranks(
    name: str, options: dict[str, Any], lengths: list[int]
) -> None:
    """The last rank's is that of one device, also where the document began on the first, and with a decay that leaves
    something of its beginning. On one device `kda` shows the state behind every document."""
    layer = small_layer(name, lengths, **options)
    norms = torch.linalg.matrix_norm(naive_state(layer))
    want = {"state_norm": norms.mean().item(), "max_state_norm": norms.max().item()}
    one = seen(layer)
    last = seen_by_ranks(layer, CPStrategy(2, "allgather", "contiguous", 2))[-1].values
    for found in (one, last) if lengths == [41] else (last,):
        assert {key: found[key] for key in want} == pytest.approx(want)
    assert 0 < one["min_decay"] < one["max_decay"] <= 1
    assert one["output_norm"] < one["max_output_norm"]


def test_the_shares_of_keys_are_what_the_recipe_asks_for() -> None:
    """Spans of 8, 16, 16 and all tokens before 60 tokens, in blocks of 4; and a window of 12 with 4 blocks more."""
    moa = seen(small_layer("moa", [60]))
    assert moa["longest_key_share"] == 1
    assert 0 < moa["shortest_key_share"] < moa["key_share"] < 1
    infllm = seen(small_layer("infllm", [60]))
    # Before the window: the first block, 2 more, and the one that the window is leaving.
    keys = sum(min(p + 1, 12) + (min((p - 12) // 4, 3) * 4 + (p - 12) % 4 + 1 if p >= 12 else 0) for p in range(60))
    assert infllm["key_share"] == pytest.approx(keys / (60 * 61 / 2))
    assert 0 < infllm["memory_mass"] < 1
