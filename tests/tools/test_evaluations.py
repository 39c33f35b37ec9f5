"""What every evaluation promises, and that a new one is a class and a registry line: for training and for `eval`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import moba_train
from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.base import Section
from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig
from moba_train.data.loss_mask import mask_prefix
from moba_train.errors import ConfigError
from moba_train.evals.evaluation import (
    Evaluation,
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    EvaluationStoppedError,
    name_of,
    with_full,
)
from moba_train.evals.registry import EVALUATIONS, evaluation_of
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import World, joined_world
from moba_train.run.evaluations import StageEvaluations
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.cli import app
from moba_train.tools.longppl import LongPPL, LongPPLConfig
from moba_train.tools.needle.needle import Needle
from moba_train.tools.needle.needle_signal import NeedleSignalEvaluation
from moba_train.tools.tasks.longtasks import LongTasks
from moba_train.tools.tasks.ruler import TASKS, Ruler
from moba_train.train import main
from tests.commands import run_app
from tests.evals.setting import stage_setting
from tests.resolved import check, stages_of
from tests.small_recipe import Load
from tests.tools import questions

RECIPE = """
name: test
run_dir: {folder}/run
model: {{vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1}}
attention: {{full_layers: "last:1", moba: {{block_size: 8, topk: 2}}}}
data: {{long_conversations: split, train: [{{path: {folder}/corpus}}], validation: [{{path: {folder}/corpus}}]}}
batch_tokens: 64
stages: [{{name: only, seq_len: 32, tokens: 192}}]
evaluation: {{every: 2, sequences: 3, position_wise: {{bucket: 16, sequences: 2}}, gate_probe: {{queries: 32}}}}
telemetry: {{console: false, report: false, wandb: {{mode: disabled}}}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage of three steps, with a layer of MoBA and a full one."""
    folder, rng = tmp_path_factory.mktemp("evaluations"), np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(rng.integers(64, size=70))
    with IndexedDatasetWriter(mask_prefix(str(folder / "corpus")), np.uint8) as masks:
        for _ in range(20):
            masks.add_document(np.arange(70) % 10 == 9)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


@pytest.fixture(scope="module")
def asking(texts: Path) -> RunConfig:
    """A recipe with a tokenizer, and the evaluations that ask questions."""
    needle = {"lengths": [256], "depths": [50], "samples": 1}
    ruler = {"tasks": [*TASKS], "lengths": [1408], "samples": 1}
    signal = needle | {"gates": [{"block_size": 32, "topk": 3}]}
    long = {"lengths": [1024], "samples": 1, "scoring": "teacher_forced"}
    asked = {"needle": needle, "needle_signal": signal, "ruler": ruler, "longtasks": long}
    return questions.recipe(texts, 1408, asked)


@pytest.fixture
def world() -> Iterator[World]:
    with joined_world() as alone:
        yield alone


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
def test_it_is_due_at_its_multiples_and_where_the_stage_may_end(evaluation: type[Evaluation[Any]]) -> None:
    """The exit criterion is judged from the end of the stage's tokens on."""
    running = SimpleNamespace(every=5)
    stage = SimpleNamespace(planned_end_step=7, end_step=12)
    due = [step for step in range(1, 13) if evaluation.due(running, step, stage)]  # type: ignore[arg-type]
    assert due == [5, 7, 10, 12]


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
@pytest.mark.parametrize("attentions", ["own", "both"])
def test_an_evaluation_gives_what_it_declares(
    recipe: Path, asking: RunConfig, world: World, evaluation: type[Evaluation[Any]], attentions: str
) -> None:
    config = asking if evaluation in (Needle, NeedleSignalEvaluation, Ruler, LongTasks) else load_config(recipe)
    (stage,) = stages_of(config)
    setting = stage_setting(config)
    options = config.evaluation.options_of(evaluation.name) or evaluation.default_options(setting)
    if evaluation is LongPPL:  # which finds key tokens in an untrained model by its thresholds alone
        options = LongPPLConfig(window=8, step=8, alpha=0, beta=-9, sequences=2)
    model = Transformer(config.model).to(world.device)
    initialize_weights(model, 0)
    both = with_full(stage.attention)
    tried = both if attentions == "both" else {name_of(stage.attention): stage.attention}
    context = EvaluationContext(model, stage, DataShard(), world.device, tried)
    result = evaluation(options, setting).run(context)
    wanted = evaluation.numbers | (evaluation.numbers_against_full if attentions == "both" else set())
    assert result.numbers.keys() == wanted
    assert all(evaluation_of(name) is evaluation for name in wanted)
    assert result.message
    assert any(name in line for name in tried for line in result.table)
    assert json.loads(json.dumps(result.data)) == result.data
    assert kinds_of(model) == [layer.kind for layer in stage.attention], "the model is left as the stage trains it"
    assert context.own == "moba"
    again = evaluation(options, setting).run(context)
    assert again.numbers == result.numbers


def kinds_of(model: Transformer) -> list[str]:
    return [kind.name or "full" for kind in model.attention_kinds()]


def test_a_criterion_gets_the_numbers_it_compares_and_no_other_step_has_them(recipe: Path, world: World) -> None:
    """The recipe does not ask for full attention, which the criterion compares with."""
    until = "{trailing_loss_recovered: {tolerance: 0.1, reference: full}, max_tokens: 512}"
    config = load_config(recipe, ["evaluation.position_wise.attention=own", f"stages.0.until={until}"])
    (stage,) = stages_of(config)
    model = Transformer(config.model).to(world.device)
    initialize_weights(model, 0)
    telemetry = SimpleNamespace(event=lambda *_, **__: None)
    context = EvaluationContext(model, stage, DataShard(), world.device)
    evaluations = StageEvaluations(config.evaluation, stage_setting(config), context, telemetry)  # type: ignore[arg-type]
    found = evaluations.run_due(2, 128)
    assert {"eval_loss", "trailing_loss", "trailing_loss_full"} <= found.keys()
    assert evaluations.numbers_at(2) == found
    assert evaluations.numbers_at(3) == {}, "else it would be the loss of another checkpoint, too"


def test_an_evaluation_that_is_stopped_leaves_the_model_as_the_stage_trains_it(recipe: Path, world: World) -> None:
    """Stopped while full attention is tried, the last one."""
    config = load_config(recipe, ["evaluation.position_wise.attention=both"])
    (stage,) = stages_of(config)
    model = Transformer(config.model).to(world.device)
    initialize_weights(model, 0)
    tried: list[list[str]] = []

    def stop_at_full_attention() -> None:
        tried.append(kinds_of(model))
        if tried[-1] == ["full", "full"]:
            raise EvaluationStoppedError

    context = EvaluationContext(model, stage, DataShard(), world.device, between_batches=stop_at_full_attention)
    reported: list[str] = []
    telemetry = SimpleNamespace(event=lambda _step, _tokens, name, *_, **__: reported.append(name))
    evaluations = StageEvaluations(config.evaluation, stage_setting(config), context, telemetry)  # type: ignore[arg-type]
    with pytest.raises(EvaluationStoppedError):
        evaluations.run_due(2, 128)
    assert tried[-1] == ["full", "full"]
    assert kinds_of(model) == ["moba", "full"]
    assert "position_wise" not in reported


@pytest.mark.parametrize(
    ("attention", "name"),
    [
        ({"default": "full"}, "full"),
        ({"default": "moba", "full_layers": "last:1"}, "moba"),
        ({"default": "msa", "full_layers": "last:1", "overrides": {1: {"kind": "moba"}}}, "moba+msa"),
        ({"default": "moba", "overrides": {1: {"kind": "msa"}}}, "moba+msa"),
    ],
)
def test_an_attention_is_named_by_all_its_kinds_beside_full(attention: dict[str, Any], name: str) -> None:
    layers = resolve_layers(AttentionConfig.model_validate(attention), 3)
    assert [*with_full(layers)] == [*dict.fromkeys([name, "full"])]


def test_no_two_evaluations_give_the_same_number_or_name() -> None:
    numbers = [
        name for evaluation in EVALUATIONS.values() for name in evaluation.numbers | evaluation.numbers_against_full
    ]
    assert len(numbers) == len(set(numbers))
    # A record of metrics.jsonl has the numbers and, under this name, the data.
    fields = {evaluation.data_name or evaluation.name for evaluation in EVALUATIONS.values()}
    assert fields.isdisjoint(numbers)
    assert {name: evaluation.name for name, evaluation in EVALUATIONS.items()} == {name: name for name in EVALUATIONS}
    assert evaluation_of("loss") is None


def test_no_evaluation_sees_the_recipe() -> None:
    """Its signature says what it reads: its own options, and facts of the run."""
    package = Path(moba_train.__file__).parent
    folders = [
        package / "evals",
        package / "mechanisms" / "probes",
        package / "tools" / "tasks",
    ]
    files = [file for folder in folders for file in folder.glob("*.py")]
    assert len(files) > 10
    assert [file for file in files if re.search("RunConfig|ResolvedRun", file.read_text(encoding="utf-8"))] == []


@pytest.fixture
def countdown() -> Iterator[None]:
    """Registers `Countdown`."""
    with EVALUATIONS.registered("countdown", Countdown):
        yield


class CountdownOptions(Section):
    """No options."""


class Countdown(Evaluation[CountdownOptions]):
    """Gives 3, 2, 1 at its evaluations, and the number of ranks."""

    name = "countdown"
    Options = CountdownOptions
    numbers = frozenset({"left"})
    left = 3.0

    def __init__(self, options: CountdownOptions, setting: EvaluationSetting) -> None:
        self.every = 1

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """One less than at the last evaluation."""
        left = Countdown.left
        Countdown.left -= 1
        names = list(context.each_attention())
        data = {"ranks": dist.get_world_size(), "attentions": names}
        return EvaluationResult({"left": left}, f"{left:g} left", [f"left: {left:g}"], data)


@pytest.mark.usefixtures("countdown")
def test_a_new_evaluation_runs_in_training_ends_a_stage_and_is_part_of_eval(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Countdown, "left", 3.0)
    until = "{metric: left, at_most: 1, max_tokens: 1024}"
    overrides = [f"run_dir={tmp_path}/run", "evaluation.countdown={}", "stages.0.tokens=128", f"stages.0.until={until}"]
    assert main([str(recipe), *overrides]) == 0

    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(r["step"], r["left"]) for r in records if r["type"] == "countdown"] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert all(r["countdown"] == {"ranks": 1, "attentions": ["moba"]} for r in records if r["type"] == "countdown")
    exits = [(r["step"], r["message"]) for r in records if r["type"] == "stage_exit"]
    assert [step for step, _ in exits] == [2, 3]
    assert exits[-1][1] == "criterion met: left 1.0000, wanted: at most 1"

    done = run_app(app, "eval", tmp_path / "run", "--output", tmp_path)
    assert "left: 0" in done.output
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["countdown"] == {"ranks": 1, "attentions": ["moba", "full"]}
    assert written["tasks"] == ["validation_loss", "position_wise", "gate_probe", "countdown"]
    assert written.keys() >= {"stage", "seq_len", *written["tasks"]}
    assert written["numbers"]["left"] == 0


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("evaluation.ruler={scoring: generated}", "ruler.scoring"),
        ("evaluation.needle={generate: true}", "needle.generate"),
    ],
)
def test_answers_are_not_generated_by_a_pipeline(load: Load, section: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load("parallel.pp=2", section, "data.validation=[{path: v}]"))
    text = "\n".join(caught.value.problems)
    assert all(words in text for words in (f"evaluation.{key}", "parallel.pp 2", "moba-train eval"))
