"""The evaluation `oracle` splits what sparse attention costs into errors that add up, and draws them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError, DataError
from moba_train.evals.evaluation import EvaluationResult
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World, joined_world
from moba_train.tools import oracle
from moba_train.tools.oracle import Oracle, OracleConfig, label_of
from moba_train.tools.report.chart import shown
from moba_train.tools.report.evaluation_charts import oracle_charts
from moba_train.tools.report.history import History, file_results
from tests.evals.setting import built
from tests.resolved import check
from tests.tools.questions import context, recipe

LENGTH = 192
BUDGETS: list[dict[str, Any]] = [
    {"block_size": 16, "topk": 3},
    {"block_size": 16, "topk": 4, "select": "group", "always": ["first", "previous"]},
    {"block_size": 1, "topk": 48},
]


def asking(texts: Path, **keys: Any) -> RunConfig:
    section = {"budgets": BUDGETS, "bucket": 64, "sequences": 3, "depths": [50], "samples": 1, "lengths": [LENGTH]}
    return recipe(texts, LENGTH, {"oracle": section | keys})


def evaluated(config: RunConfig, seed: int = 0) -> EvaluationResult:
    model = Transformer(config.model)
    initialize_weights(model, seed)
    return built(Oracle, config).run(context(config, model))


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    with joined_world() as one:
        yield one


@pytest.fixture(scope="module")
def result(texts: Path) -> EvaluationResult:
    return evaluated(asking(texts, questions=["needle"]))


def trailing(found: EvaluationResult, name: str) -> float:
    mean: float = found.data["attentions"][name]["mean"][-1]
    return mean


def test_the_errors_of_a_budget_add_up_to_what_its_gate_loses(result: EvaluationResult) -> None:
    for budget in result.data["budgets"][:2]:
        (lost, _), (missed, _) = budget["loss"]["budget"], budget["loss"]["selector"]
        assert lost + missed == pytest.approx(trailing(result, f"gate {budget['label']}") - trailing(result, "full"))
        assert abs(lost) > 1e-6
        assert abs(missed) > 1e-6
    assert result.numbers["budget_error"] == result.data["budgets"][0]["loss"]["budget"][0]


def test_tokens_have_an_ideal_selection_alone(result: EvaluationResult) -> None:
    assert result.data["budgets"][2]["label"] == "48 tokens"
    assert result.data["budgets"][2]["loss"].keys() == {"budget"}


def test_capped_layers_get_no_uncapped_selection(texts: Path) -> None:
    config = asking(texts, questions=[])
    plain = config.model_dump(mode="json")
    for overrides, kinds in (({0: {"kind": "capped"}}, ["capped", "oracle", "full"]), (None, None)):
        attention = plain["attention"] | {"overrides": overrides} if overrides else {"default": "capped"}
        config = RunConfig.model_validate(plain | {"attention": attention})
        model = Transformer(config.model)
        asked = built(Oracle, config)
        if kinds is None:
            with pytest.raises(DataError, match=r"evaluation.oracle: given layers of capped; allowed: some that kind"):
                asked.run(context(config, model))
        else:
            layers = asked._attentions(context(config, model))["oracle 16/3"]
            assert [layer.kind for layer in layers] == kinds


def test_the_gate_of_the_own_sizes_is_the_own_attention(result: EvaluationResult) -> None:
    """The recipe's blocks of 16 and top 3, in the same layers."""
    assert result.data["attentions"]["moba"]["mean"] == result.data["attentions"]["gate 16/3"]["mean"]
    assert [budget["own_gate"] for budget in result.data["budgets"]] == [True, False, False]


def test_layers_that_are_full_stay_full(texts: Path) -> None:
    config = asking(texts)
    model = Transformer(config.model)
    attentions = built(Oracle, config)._attentions(context(config, model))
    assert {name: [layer.kind for layer in layers] for name, layers in attentions.items()} == {
        "full": ["full"] * 3,
        "moba": ["moba", "moba", "full"],
        "oracle 16/3": ["oracle", "oracle", "full"],
        "gate 16/3": ["moba", "moba", "full"],
        "oracle 16/4 group, first + previous": ["oracle", "oracle", "full"],
        "gate 16/4 group, first + previous": ["moba", "moba", "full"],
        "oracle 48 tokens": ["oracle", "oracle", "full"],
    }


def test_groups_of_heads_that_are_full_stay_full(texts: Path) -> None:
    given = asking(texts, budgets=[{"block_size": 16, "topk": 3}]).model_dump(mode="json")
    part = {"groups": [1], "kind": "msa", "options": {"block_size": 16, "topk": 3}}
    given["attention"] = {"default": "by_group", "by_group": {"parts": [part]}, "overrides": {2: {"kind": "full"}}}
    config = RunConfig.model_validate(given)
    attentions = built(Oracle, config)._attentions(context(config, Transformer(config.model)))
    own, ideal = attentions["gate 16/3"], attentions["oracle 16/3"]
    assert [layer.kind for layer in own] == [layer.kind for layer in ideal] == ["by_group", "by_group", "full"]
    (ours,), (theirs,) = (layers[0].options.parts for layers in (own, ideal))  # type: ignore[attr-defined]
    assert (ours.kind, theirs.kind, theirs.groups) == ("msa", "oracle", (1,))


def test_a_gate_of_groups_of_heads_keeps_its_other_options(texts: Path) -> None:
    given = asking(texts, budgets=[{"block_size": 16, "topk": 3}]).model_dump(mode="json")
    part = {"groups": [1], "kind": "moba", "options": {"block_size": 32, "topk": 3, "backend": "reference"}}
    given["attention"] = {"default": "by_group", "by_group": {"parts": [part]}}
    config = RunConfig.model_validate(given)
    layers = built(Oracle, config)._attentions(context(config, Transformer(config.model)))["gate 16/3"]
    (gate,) = layers[0].options.parts  # type: ignore[attr-defined]
    assert (gate.options.block_size, gate.options.backend) == (16, "reference")


def test_a_model_whose_layers_are_all_full_is_made_sparse_in_all(texts: Path) -> None:
    config = asking(texts)
    both = context(config, Transformer(config.model))
    attentions = built(Oracle, config)._attentions(replace(both, attentions={"full": both.attentions["full"]}))
    assert [layer.kind for layer in attentions["oracle 16/3"]] == ["oracle"] * 3


def test_layers_that_kind_full_cannot_replace_stay_as_they_are(texts: Path) -> None:
    given = asking(texts, budgets=[{"block_size": 16, "topk": 3}]).model_dump(mode="json")
    for other in ({"kind": "nsa"}, {"kind": "moba_v1", "merge": "gate"}, {"kind": "moba", "key_conv": 3}):
        given["attention"]["overrides"] = {0: other}
        config = RunConfig.model_validate(given)
        attentions = built(Oracle, config)._attentions(context(config, Transformer(config.model)))
        kinds = {name: [layer.kind for layer in layers[1:]] for name, layers in attentions.items()}
        assert kinds["full"] == ["full", "full"]
        assert kinds["oracle 16/3"] == ["oracle", "full"]
        assert kinds["gate 16/3"] == ["moba", "full"]
        assert {layers[0].kind for layers in attentions.values()} == {other["kind"]}
        assert attentions["gate 16/3"][1].options.key_conv == 0  # type: ignore[attr-defined]
        alone = RunConfig.model_validate(
            given | {"attention": {"full_layers": "last:1", "overrides": {"first:2": other}}}
        )
        with pytest.raises(DataError, match=r"oracle: given layers of \w+; allowed: some that kind full"):
            built(Oracle, alone)._attentions(context(alone, Transformer(alone.model)))


def test_the_weights_error_is_full_attentions_difference_to_other_weights(
    texts: Path, result: EvaluationResult, tmp_path: Path
) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"oracle": result.data}))
    other = evaluated(asking(texts, questions=["needle"], dense=str(file)), seed=1)
    mean, error = other.data["weights"]["loss"]
    assert mean == pytest.approx(trailing(other, "full") - trailing(result, "full"), abs=1e-5)  # five digits are kept
    assert error > 0
    assert other.data["weights"]["scores"].keys() == {"needle", f"needle {LENGTH}"}
    assert any(line.startswith("error of the weights: loss") for line in other.table)
    result_of_less = json.dumps({"oracle": result.data | {"sequences": 2}})
    file.write_text(result_of_less)
    with pytest.raises(DataError, match="allowed: a result of"):
        built(Oracle, asking(texts, dense=str(file)))


def test_what_cannot_be_asked_or_compared_is_refused_before_anything_is_measured(
    texts: Path, result: EvaluationResult, tmp_path: Path
) -> None:
    file = tmp_path / "evaluation.json"
    for content, problem in (
        (None, r"no result of this evaluation \(.*No such file"),
        ({}, r"no result of this evaluation \(key 'oracle' is missing\); allowed: an evaluation\.json of"),
        ({"oracle": result.data}, f"with the scores needle {LENGTH}; allowed: a result with needle 184"),
    ):
        if content is not None:
            file.write_text(json.dumps(content))
        with pytest.raises(DataError, match=rf"evaluation\.oracle\.dense: given .*{problem}"):
            built(Oracle, asking(texts, questions=["needle"], lengths=[184], dense=str(file)))
    with pytest.raises(DataError, match=r"evaluation\.oracle\.lengths: given 192; the shortest sample of niah_multi"):
        built(Oracle, asking(texts, questions=["ruler"]))


def test_ruler_is_asked_with_every_attention(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "RULER_TASKS", ["niah_single"])
    with IndexedDatasetWriter(tmp_path / "long", np.uint16) as writer:
        for start in range(2):
            writer.add_document(np.arange(start, 600 + start) % 300)
    keys = {"questions": ["ruler"], "sequences": 2}
    section = {"budgets": BUDGETS[:1], "bucket": 128, "samples": 1, "lengths": [512], **keys}
    config = recipe(texts, 512, {"oracle": section})
    long = config.data.validation[0].model_copy(update={"path": str(tmp_path / "long")})
    data = config.data.model_copy(update={"validation": [long]})
    found = evaluated(config.model_copy(update={"data": data}))
    assert all(one["scores"].keys() == {"ruler", "ruler 512"} for one in found.data["attentions"].values())


def test_every_budget_and_error_is_drawn(result: EvaluationResult) -> None:
    content = {"tasks": ["oracle"], "oracle": result.data, "step": 1, "stage": "s", "time": 0.0}
    history = History(Path(), "run", results=[*file_results(content, "evaluation.json")])
    loss, *scores = oracle_charts(shown([history]))
    assert [trace["x"] for trace in loss.traces] == [
        [label_of(one) for one in OracleConfig(budgets=BUDGETS).budgets]
    ] * 2
    assert [trace["y"][0] for trace in loss.traces] == [
        result.data["budgets"][0]["loss"][name][0] for name in ("budget", "selector")
    ]
    assert loss.traces[1]["y"][2] is None
    assert [chart.key for chart in scores] == ["oracle-0-needle", f"oracle-0-needle-{LENGTH}"]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"bucket": 100}, "evaluation.oracle.bucket: given 100, which does not divide"),
        ({"budgets": [{"topk": 2, "always": ["first", "previous"]}]}, "evaluation.oracle.budgets: given 128/2, first"),
        ({"questions": ["needle"], "lengths": [4096]}, "evaluation.oracle.lengths: given 4096"),
    ],
)
def test_what_cannot_be_is_named(texts: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + problem.replace(".", r"\.").replace("+", r"\+")):
        check(asking(texts, **keys))
