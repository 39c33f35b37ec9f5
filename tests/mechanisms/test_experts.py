"""A mixture of experts on one device: what it computes, what balances it, and which options are refused."""

from typing import Any

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError
from moba_train.mechanisms.experts import products, router, step
from moba_train.mechanisms.experts.balance import Balance
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.mechanisms.experts.options import MoeOptions
from tests.mechanisms.experts_model import ACTIVE, EXPERTS, HIDDEN, drawn, mixture, options, token_by_token

ROUTERS: dict[str, dict[str, Any]] = {
    "Qwen3, Mixtral": {},
    "not normalized, a shared expert": {"router": {"normalize": False}, "shared": 2},
    "DeepSeek-V3": {
        "router": {"score": "sigmoid", "scale": 2.5, "groups": 4, "active_groups": 2, "balance": "bias"},
        "shared": 1,
    },
    "softmax in groups": {"router": {"groups": 2, "active_groups": 1}},
    "gpt-oss": {"bias": True, "clamp": 0.6},
    "Qwen3-Next": {"shared": 2, "shared_gate": True},
    "losses": {"router": {"aux_loss": 0.1, "z_loss": 0.01}},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_layer_is_what_its_definition_says_with_its_gradients(name: str) -> None:
    layer = mixture(options(**ROUTERS[name]), torch.float64)
    layer.bias.copy_(0.2 * drawn(EXPERTS, seed=5))
    x = drawn(40, HIDDEN, dtype=torch.float64).requires_grad_()
    probe = drawn(40, HIDDEN, seed=2, dtype=torch.float64)
    weights = [x, *layer.parameters()]
    found, _ = layer(x)
    want = token_by_token(layer, x)
    torch.testing.assert_close(found, want)
    got = torch.autograd.grad((found * probe).sum(), weights)
    for gradient, wanted in zip(got, torch.autograd.grad((want * probe).sum(), weights), strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("width", [6, 7])
def test_experts_in_float32_may_have_any_width(width: int) -> None:
    """torch's grouped products take rows of whole 16 bytes alone: not the 10 columns that `tp: 2` leaves of 20."""
    layer = mixture(options(intermediate_size=width))
    assert ("cpu", torch.float32) in products.GROUPED
    x = drawn(40, HIDDEN).requires_grad_()
    found, _ = layer(x)
    want = token_by_token(layer, x)
    torch.testing.assert_close(found, want)
    weights = [x, *layer.parameters()]
    got = torch.autograd.grad(found.sum(), weights)
    for gradient, wanted in zip(got, torch.autograd.grad(want.sum(), weights), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ROUTERS)
def test_costs_count_the_parameters_of_the_layer(name: str) -> None:
    layer = mixture(options(**ROUTERS[name]))
    shape = ModelConfig(vocab_size=2, hidden_size=HIDDEN, intermediate_size=1, layers=1, heads=1, kv_heads=1)
    costs = MixtureOfExperts.costs(layer.options, shape)
    assert costs.parameters == sum(parameter.numel() for parameter in layer.parameters())
    assert costs.separate == sum(parameter.numel() for parameter in layer.experts.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 9, 0], [0, 0, 0, 12], [0, 0, 0, 0]], ids=str)
def test_grouped_products_are_those_of_a_loop_also_for_experts_without_tokens(
    sizes: list[int], dtype: torch.dtype
) -> None:
    assert ("cpu", dtype) in products.GROUPED, "else this compares the loop with itself"
    ends = torch.tensor(sizes).cumsum(0).int()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    results = []
    for product in (products.grouped_product, products.looped_product):
        x = drawn(sum(sizes), HIDDEN, dtype=dtype).requires_grad_()
        weight = drawn(4, 8, HIDDEN, seed=2, dtype=dtype).requires_grad_()
        out = product(x, weight, ends)
        (out * drawn(sum(sizes), 8, seed=3, dtype=dtype)).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert weight.grad[[size == 0 for size in sizes]].abs().sum() == 0
        results.append((out.detach(), x.grad, weight.grad))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_no_token_is_dropped_where_all_choose_the_same_experts() -> None:
    layer = mixture(options(router={"balance": "bias"}), torch.float64)
    layer.bias[:ACTIVE] = 10
    x = drawn(50, HIDDEN, dtype=torch.float64)
    scores = router.scores(layer.router(x, layer.router.weight), layer.options.router)
    experts_Tk, _, ends_E, *_ = router.choose(scores, layer.bias, layer.balance.handle)
    assert sorted(experts_Tk.unique().tolist()) == list(range(ACTIVE))
    assert ends_E.tolist() == [50, 100] + [150] * (EXPERTS - 2)
    torch.testing.assert_close(layer(x)[0], token_by_token(layer, x))


def counted(layer: Any, x: torch.Tensor, rows: list[int] | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Counts of the layer, and its auxiliary losses, where these rows carry loss."""
    layer.count_tokens(None if rows is None else (torch.zeros(len(rows)), torch.tensor(rows), torch.ones(len(rows))))
    _, auxiliary = layer(x)
    return layer.balance.counts(layer.bias.data_ptr()), auxiliary


def test_the_auxiliary_loss_is_its_formula_over_the_tokens_that_carry_loss() -> None:
    layer = mixture(options(router={"aux_loss": 0.5, "z_loss": 0.25}), torch.float64)
    x = drawn(30, HIDDEN, dtype=torch.float64)
    rows = [0, 3, 4, 11, 29]
    counts, auxiliary = counted(layer, x, rows)
    assert counts is not None
    assert auxiliary is not None
    logits = x @ layer.router.weight.T
    p = logits.softmax(1)
    chosen = p.topk(ACTIVE, dim=1).indices
    load = torch.stack([(chosen[rows] == expert).sum() for expert in range(EXPERTS)])
    assert counts[:EXPERTS].tolist() == load.tolist()
    assert counts[-1] == len(rows)
    assert float(counts[-2]) == pytest.approx(-(p * p.log()).sum(1)[rows].sum().item())
    want = 0.5 * EXPERTS * (p * (load / load.sum())).sum(1) + 0.25 * logits.logsumexp(1) ** 2
    torch.testing.assert_close(auxiliary, want.float())


def test_the_auxiliary_loss_of_a_token_takes_the_load_of_its_sequence() -> None:
    """Rows of three sequences, in no order, as a rank of context parallelism has them; one has no counted token."""
    layer = mixture(options(router={"aux_loss": 0.5}), torch.float64)
    x = drawn(30, HIDDEN, dtype=torch.float64)
    sequence = torch.arange(30) % 3
    rows = [row for row in range(0, 30, 2) if row % 3]
    whole, _ = counted(layer, x, rows)
    layer.balance = Balance(layer.options, sequences=3)
    layer.balance.sequence_T = sequence
    counts, auxiliary = counted(layer, x, rows)
    assert counts is not None
    assert whole is not None
    assert auxiliary is not None
    assert torch.equal(counts, whole), "metrics and biases take them together"
    p = (x @ layer.router.weight.T).softmax(1)
    chosen = p.topk(ACTIVE, dim=1).indices
    want = torch.zeros(30, dtype=torch.float64)
    for own in (1, 2):
        of = [row for row in rows if sequence[row] == own]
        load = torch.stack([(chosen[of] == expert).sum() for expert in range(EXPERTS)])
        of_sequence = sequence == own
        want[of_sequence] = 0.5 * EXPERTS * (p[of_sequence] * (load / load.sum())).sum(1)
    torch.testing.assert_close(auxiliary, want.float())


def test_an_evaluation_counts_nothing() -> None:
    layer = mixture(options(router={"balance": "both"}))
    counts, auxiliary = counted(layer, drawn(30, HIDDEN), None)
    assert counts is None
    assert auxiliary is not None
    assert auxiliary.abs().sum() == 0


def test_biases_move_against_the_load_of_the_step_by_one_update_each() -> None:
    layer = mixture(options(router={"balance": "bias", "bias_update": 0.125}))
    layer.balance.forget()
    for seed in (1, 2):  # two micro-batches
        counted(layer, drawn(30, HIDDEN, seed=seed), list(range(30)))
    metrics = step.measure({4: layer}, layer.options, 5, torch.device("cpu"), 1)
    counts = layer.balance.counts(layer.bias.data_ptr())
    assert counts is not None
    load = counts[:EXPERTS]
    assert load.sum() == 60 * ACTIVE
    step.update({4: layer}, layer.options)
    moved = (0.125 * (load.mean() - load).sign()).tolist()
    assert layer.bias.tolist() == moved
    layer.router.requires_grad_(False)  # as in a stage that trains other weights, or under adapters
    step.update({4: layer}, layer.options)
    assert layer.bias.tolist() == moved
    assert float(metrics["expert_load_max"]) == pytest.approx(float(load.max() / load.mean()))
    assert metrics["expert_dropped"] == 0
    counts[0] -= 7
    assert step.measure({4: layer}, layer.options, 5, torch.device("cpu"), 1)["expert_dropped"] == 7


def test_a_step_repeats_bit_by_bit() -> None:
    layer = mixture(options(shared=1), torch.bfloat16)
    x = drawn(500, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weights = [x, *layer.parameters()]
    runs = []
    for _ in range(2):
        out, _ = layer(x)
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), weights)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_biases_of_the_choice_stay_in_float32_and_begin_at_zero() -> None:
    """Also in a model that is moved, cast, or made on "meta" and filled, as `generate` and `eval` do."""
    layer = mixture(options(router={"balance": "bias"}))
    layer.bias.copy_(0.25 + 0.001 * torch.arange(EXPERTS))
    want = layer.bias.clone()
    assert torch.equal(layer.bfloat16().bias, want)
    assert layer.router.weight.dtype == torch.bfloat16
    with torch.device("meta"):
        empty = mixture(options(router={"balance": "bias"}))
    empty.bfloat16().to_empty(device="cpu")
    assert torch.equal(empty.bias, torch.zeros(EXPERTS))


def test_layers_share_one_balance_and_count_apart() -> None:
    layers = {0: mixture(options()), 3: mixture(options(), seed=7)}
    shared = Balance(options())
    for layer in layers.values():
        layer.balance = shared
        counted(layer, drawn(20, HIDDEN), list(range(20)))
    metrics = step.measure(layers, options(layers=[0, 3]), 4, torch.device("cpu"), 1)
    names = ("expert_load_layer", "expert_load_max_layer")
    assert {name for name in metrics if "layer" in name} == {f"{name}_{layer}" for name in names for layer in layers}
    assert metrics["expert_load_max_layer_0"] != metrics["expert_load_max_layer_3"]


def test_a_model_none_of_whose_layers_has_experts_has_no_metrics_of_them() -> None:
    assert step.measure({}, options(layers="none"), 2, torch.device("cpu"), 1) == {}


def test_the_load_of_very_many_experts_is_in_every_hundredth_record(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = mixture(options())
    counts, _ = counted(layer, drawn(20, HIDDEN), list(range(20)))
    assert counts is not None

    def loads(number: int) -> list[float] | None:
        found = step.measure({0: layer}, layer.options, 1, torch.device("cpu"), number).get("expert_load_layer_0")
        return None if found is None else found.tolist()

    percent = (100 * EXPERTS * counts[:EXPERTS] / counts[:EXPERTS].sum()).round().tolist()
    assert loads(1) == loads(100) == percent
    monkeypatch.setattr(step, "MOST_LOADS", EXPERTS - 1)
    assert (loads(99), loads(100)) == (None, percent)


SHAPE = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "layers": 4, "heads": 2, "kv_heads": 2}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"active": 9}, "active: given 9; allowed: at most experts, 8"),
        ({"layers": "last:5"}, "asks for 5 layers; the model has 4"),
        ({"router": {"balance": "loss", "bias_update": 0.1}}, "bias_update: given with balance: loss"),
        ({"router": {"balance": "bias", "aux_loss": 0.1}}, "aux_loss: given with balance: bias"),
        ({"router": {"groups": 4}}, "groups and active_groups: one is given"),
        ({"router": {"groups": 3, "active_groups": 1}}, "router.groups: given 3, which does not divide experts 8"),
        ({"router": {"groups": 4, "active_groups": 1}}, "whose groups have 2 experts; allowed: at least active, 3"),
        ({"capacity": 2}, "Extra inputs are not permitted"),
    ],
)
def test_sections_that_contradict_themselves_are_refused(changes: dict[str, Any], problem: str) -> None:
    given = options().model_dump(exclude_defaults=True) | changes
    with pytest.raises(ValueError, match=problem):
        ModelConfig.model_validate(SHAPE | {"moe": given})


def test_a_dtype_of_the_router_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"model\.moe\.router\.dtype: unknown key \(logits and scores are float32, "):
        load_config("qwen3-30b-a3b-128k", ["model.moe.router.dtype=fp32"])


def test_a_section_survives_being_saved_in_full() -> None:
    config = ModelConfig.model_validate(SHAPE | {"moe": options(layers="first:1").model_dump()})
    assert ModelConfig.model_validate(config.model_dump()) == config
    assert [config.feed_forward(layer) is not None for layer in range(4)] == [True, False, False, False]
    assert isinstance(config.given_members["moe"], MoeOptions)
