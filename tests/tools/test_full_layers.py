"""The evaluation `full_layers` switches layers one by one, chooses by loss, and writes what a recipe takes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError, DataError
from moba_train.evals.evaluation import EvaluationResult
from moba_train.evals.position_wise import PositionWiseLoss
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World, joined_world
from moba_train.tools.full_layers import FullLayers
from tests.evals.setting import built
from tests.resolved import check
from tests.tools.questions import context, recipe

LENGTH = 128
NEEDLE_LENGTH = 192
"""Tokens that hold a needle and its question."""


def asking(texts: Path, length: int = LENGTH, **keys: Any) -> RunConfig:
    section = {"count": 1, "bucket": 64, "sequences": 2} | keys
    return recipe(texts, length, {"full_layers": section})


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    with joined_world() as one:
        yield one


@pytest.fixture(scope="module")
def result(texts: Path) -> EvaluationResult:
    """Of a model whose second layer alone attends to more than noise: its weights are larger."""
    config = asking(texts)
    model = Transformer(config.model)
    initialize_weights(model, 0)
    weights = dict(model.named_parameters())
    for layer, factor in enumerate((0.0, 3.0, 0.0)):
        weights[f"blocks.{layer}.attention.q_proj.weight"].data *= factor
        weights[f"blocks.{layer}.attention.o_proj.weight"].data *= factor
    return built(FullLayers, config).run(context(config, model))


def test_the_layer_that_attends_is_chosen(result: EvaluationResult) -> None:
    """The others add nothing to the residual stream, however they attend."""
    rows = result.data["layers"]
    assert [abs(row["gain"]) < 1e-6 for row in rows] == [True, False, True]
    assert [abs(row["cost"]) < 1e-6 for row in rows] == [True, False, True]
    losses = result.data["losses"]
    assert losses["sparse"] - losses["full"] == pytest.approx(rows[1]["gain"], abs=1e-6)
    assert (result.data["chosen"] == [1]) == (rows[1]["gain"] > 0)
    by_cost = next(one["layers"] for one in result.data["candidates"] if one["name"] == "cost")
    assert (by_cost == [1]) == (rows[1]["cost"] > 0)


def test_probability_outside_the_selection_is_told_for_every_layer(result: EvaluationResult) -> None:
    assert all(0 < row["mass_outside"] < 1 for row in result.data["layers"])


def test_the_candidate_with_the_lowest_loss_is_chosen_and_the_last_layers_are_one(result: EvaluationResult) -> None:
    candidates = {one["name"]: one for one in result.data["candidates"]}
    assert candidates["last"]["layers"] == [2]
    assert candidates["spread"]["layers"] == [1]
    measured = {name: one["trailing"] for name, one in candidates.items() if name not in ("sparse", "full")}
    best = min(measured, key=lambda name: measured[name])
    assert candidates[best]["layers"] == result.data["chosen"]
    assert measured[best] == result.data["losses"]["chosen"]


def test_heads_that_see_all_tokens_alike_give_each_its_share(texts: Path) -> None:
    config = asking(texts, NEEDLE_LENGTH, by="needle", samples=1, depths=[30], lengths=[NEEDLE_LENGTH])
    model = Transformer(config.model)
    initialize_weights(model, 0)
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            weight.data.zero_()
    evaluation = built(FullLayers, config)
    (question,) = evaluation._questions
    here = context(config, model)
    full = (LayerAttention("full", FullAttention.Options()),) * 3
    groups = [group for layer in evaluation._reach(here, here.attentions["moba"][0], full) for group in layer]
    assert len(groups) == 3 * 2
    for group in groups:
        share = sum(1 / place for place in question.places) / len(question.places)
        assert group["copy"] == pytest.approx(share, rel=1e-4)
        # 3 blocks of 16 of the half of a sequence and more: the own one is not complete.
        assert 0.5 < group["outside"] < 0.8
        assert group["outside_window"] == pytest.approx(group["outside"], abs=0.1)


def test_layers_may_be_switched_one_way_only(texts: Path) -> None:
    config = asking(texts, switch=["sparse"])
    model = Transformer(config.model)
    initialize_weights(model, 0)
    data = built(FullLayers, config).run(context(config, model)).data
    assert [row["gain"] for row in data["layers"]] == [None] * 3
    assert {one["name"] for one in data["candidates"]} == {"sparse", "full", "cost", "mass_outside", "spread", "last"}
    assert any("–" in line and "±" in line for line in data["yaml"])


@pytest.mark.parametrize("stands_for", [None, {"kind": "msa", "options": {"block_size": 8}}])
def test_groups_of_heads_may_be_full_instead_of_layers(
    texts: Path, stands_for: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(texts, groups=True, stands_for=stands_for)
    model = Transformer(config.model)
    initialize_weights(model, 0)
    evaluation = built(FullLayers, config)
    here = context(config, model)
    monkeypatch.setattr(evaluation, "_group_candidates", lambda rows: {"groups_outside": {0: [1], 2: [0]}})
    monkeypatch.setattr(evaluation, "_candidates", lambda rows: {"last": [2]})
    measured = evaluation._measured
    seen: dict[str, Any] = {}

    def best_by_groups(context: Any, attentions: Any) -> Any:
        seen.update(attentions)
        found = measured(context, attentions)
        return {
            name: replace(one, trailing=PositionWiseLoss(64, one.trailing.losses - 9)) if "groups" in name else one
            for name, one in found.items()
        }

    monkeypatch.setattr(evaluation, "_measured", best_by_groups)
    data = evaluation.run(here).data
    assert [layer.kind for layer in seen["groups_outside"]] == ["by_group", "moba", "by_group"]
    fragment = yaml.safe_load("\n".join(data["yaml"]))["attention"]
    assert fragment["full_layers"] == data["chosen"] == []
    assert "&" not in "".join(data["yaml"]), "an anchor, where a reader edits one layer and changes another"
    (part,) = fragment["overrides"][0]["parts"]
    assert part["groups"] == [0]
    assert part["kind"] == ("moba" if stands_for is None else "msa")
    kept = {"attention": config.attention.model_dump(mode="json") | fragment}
    check(RunConfig.model_validate(config.model_dump(mode="json") | kept))
    (candidate,) = (one for one in data["candidates"] if one["name"] == "groups_outside")
    assert candidate["layers"] == {0: [1], 2: [0]}


def test_the_groups_that_look_farthest_are_as_many_as_the_layers_have(texts: Path) -> None:
    evaluation = built(FullLayers, asking(texts, groups=True))
    outside = {0: (0.1, 0.9), 2: (0.8, 0.7)}
    rows = [{"layer": layer, "groups": [{"outside": one} for one in values]} for layer, values in outside.items()]
    assert evaluation._group_candidates(rows) == {"groups_outside": {0: [1], 2: [0]}}


def test_a_layer_stays_that_kind_full_cannot_replace(texts: Path) -> None:
    """Capped scores, also without a window: uncapped ones would be another model."""
    plain = asking(texts, switch=["full"]).model_dump(mode="json")
    for window in (None, 8):
        capped = {"kind": "capped", "cap": 1.0, "window": window}
        attention = plain["attention"] | {"overrides": {0: capped}}
        config = RunConfig.model_validate(plain | {"attention": attention})
        model = Transformer(config.model)
        initialize_weights(model, 0)
        data = built(FullLayers, config).run(context(config, model)).data
        assert [row["layer"] for row in data["layers"]] == [1, 2]
    alone = RunConfig.model_validate(plain | {"attention": {"default": "capped"}})
    with pytest.raises(DataError, match=r"full_layers: no layer could be full and is not; give attention.default=moba"):
        built(FullLayers, alone).run(context(alone, model))


@pytest.mark.parametrize(
    ("other", "switched"),
    [
        ({"kind": "moba_v1", "merge": "gate", "block_size": 16}, [1, 2]),
        ({"kind": "by_group", "parts": [{"groups": [1], "kind": "window", "options": {"window": 8}}]}, [0, 1, 2]),
    ],
)
def test_layers_are_switched_one_by_one(texts: Path, other: dict[str, Any], switched: list[int]) -> None:
    """Next to one that has no full attention, and where groups of heads have windows."""
    plain = asking(texts, switch=["full"]).model_dump(mode="json")
    config = RunConfig.model_validate(plain | {"attention": plain["attention"] | {"overrides": {0: other}}})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    data = built(FullLayers, config).run(context(config, model)).data
    assert [row["layer"] for row in data["layers"]] == switched


def test_heads_are_measured_behind_the_windows_that_the_model_keeps(texts: Path) -> None:
    by_window = []
    for window in (1, LENGTH):
        plain = asking(texts).model_dump(mode="json")
        attention = plain["attention"] | {"overrides": {0: {"kind": "window", "window": window}}}
        config = RunConfig.model_validate(plain | {"attention": attention})
        model = Transformer(config.model)
        initialize_weights(model, 0)
        by_window.append(built(FullLayers, config).run(context(config, model)).data["layers"])
    narrow, wide = ([row["groups"] for row in rows] for rows in by_window)
    assert len(narrow) == 2
    assert narrow != wide


@pytest.mark.parametrize("by", ["needle", "copy"])
def test_needles_decide_where_they_are_asked_for(texts: Path, by: str) -> None:
    config = asking(texts, NEEDLE_LENGTH, by=by, samples=1, depths=[30, 70], lengths=[NEEDLE_LENGTH])
    model = Transformer(config.model)
    initialize_weights(model, 0)
    data = built(FullLayers, config).run(context(config, model)).data
    candidates = {one["name"]: one for one in data["candidates"]}
    assert "copy" in candidates
    by_needle = {name: one["answers"] for name, one in candidates.items() if name not in ("sparse", "full")}
    copies = {row["layer"]: row["copy"] for row in data["layers"]}
    assert candidates["copy"]["layers"] == [max(copies, key=lambda layer: copies[layer])]
    best = "copy" if by == "copy" else min(by_needle, key=lambda name: by_needle[name])
    assert candidates[best]["layers"] == data["chosen"]
    assert candidates["full"]["answers"] != candidates["sparse"]["answers"]
    gains = candidates["sparse"]["answers"] - candidates["full"]["answers"]
    assert gains != candidates["sparse"]["trailing"] - candidates["full"]["trailing"]


def test_the_fragment_is_a_recipe_s(result: EvaluationResult) -> None:
    fragment = yaml.safe_load("\n".join(result.data["yaml"]))
    assert fragment == {"attention": {"full_layers": result.data["chosen"]}}
    assert result.numbers == {"full_layers_loss": result.data["losses"]["chosen"]}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"count": 3}, "evaluation.full_layers.count: given 3; allowed: fewer than the model's 3 layers"),
        ({"bucket": 100}, "evaluation.full_layers.bucket: given 100, which does not divide"),
        ({"stands_for": {"kind": "mas"}}, r"(?s)evaluation.full_layers.stands_for.*kind: given mas; allowed: .*msa"),
    ],
)
def test_what_cannot_be_is_named(texts: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(asking(texts, **keys))
