"""A recipe that changes when a run resumes leaves a trace, and what would silently change the meaning is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moba_train.config.load import dump_config, load_config, parse_yaml
from moba_train.run.recipe_changes import MOST_SHOWN, describe_changes, recipe_changes, write_recipe
from moba_train.run.trainer import Trainer
from tests.run.tiny_run import Run


class PowerCut(Exception):
    pass


def test_every_changed_key_is_an_event_and_the_recipe_before_is_kept(run: Run) -> None:
    assert run.train_here("--stop-at-step", "4") == 0
    before = (run.run_dir / "config.yaml").read_text()
    assert run.train_here("--stop-at-step", "5") == 0
    assert not run.records("recipe"), "the same recipe is no event"

    run.recipe["optim"]["lr"] = 0.005
    run.recipe["loss_norm"] = "sequence"
    run.recipe["attention"]["moba"]["topk"] = 3
    run.recipe["stages"][1]["micro_batch_size"] = 4
    run.recipe["stages"].append(run.recipe["stages"][1] | {"name": "longer"})
    assert run.train_here("--stop-at-step", "6") == 0
    (event,) = run.records("recipe")
    changes = event["changes"]
    added = changes.pop("stages[2]")
    assert changes == {
        "attention.moba.topk": [2, 3],
        "optim.lr": [0.01, 0.005],
        "loss_norm": ["token", "sequence"],
        "stages[1].micro_batch_size": [2, 4],
    }
    assert added[0] is None
    assert added[1]["name"] == "longer"
    assert (event["step"], event["changed_keys"]) == (5, 5)
    assert "changed since the checkpoint of step 5" in event["message"]
    assert "optim.lr 0.01 -> 0.005" in event["message"]
    kept = run.run_dir / "config.step_00000005.yaml"
    assert kept.read_text() == before
    assert (run.run_dir / "config.yaml").read_text() == dump_config(load_config(run.write_recipe()))


def test_a_change_that_is_taken_back_is_reported_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of the start with the change stay in the history, because they are of the checkpoint's step."""
    assert run.train_here("--stop-at-step", "4") == 0
    run.recipe["optim"]["lr"] = 0.005
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", _killed)
        with pytest.raises(PowerCut):
            run.train_here()
    run.recipe["optim"]["lr"] = 0.01
    assert run.train_here("--stop-at-step", "5") == 0
    messages = [record["message"] for record in run.records("recipe")]
    assert messages == [
        "changed since the checkpoint of step 4: optim.lr 0.01 -> 0.005",
        "again as in the checkpoint of step 4, unlike that of the start before",
    ]
    kept = {path.name: parse_yaml(path.read_text(), "")["optim"]["lr"] for path in run.run_dir.glob("config*.yaml")}
    assert kept == {"config.yaml": 0.01, "config.step_00000004.yaml": 0.01, "config.step_00000004-2.yaml": 0.005}


def _killed(*arguments: object) -> bool:
    raise PowerCut


def test_another_tokenizer_is_refused_wherever_it_lies(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")

    def write(path: Path, words: str) -> Path:
        vocabulary = {word: index for index, word in enumerate(words.split())}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a")).save(str(path))
        return path

    one = write(run.folder / "one.json", "a b c")
    run.recipe["data"]["tokenizer"] = str(one)
    assert run.train_here("--stop-at-step", "4") == 0
    write(one, "a c b")
    assert run.train_here() == 2
    assert "data.tokenizer" in capsys.readouterr().err
    moved = write(run.folder / "moved.json", "a b c")
    run.recipe["data"]["tokenizer"] = str(moved)
    assert run.train_here("--stop-at-step", "5") == 0
    assert run.records("recipe")[0]["changes"] == {"data.tokenizer": [str(one), str(moved)]}


def test_a_recipe_is_never_overwritten(run: Run) -> None:
    """Nor kept twice, when a start is killed between keeping the old one and writing the new one."""
    config = load_config(run.write_recipe())
    run.run_dir.mkdir()
    current = run.run_dir / "config.yaml"
    assert write_recipe(run.run_dir, dump_config(config), 7) is None
    for text in ("first", "second", "second", "third"):
        current.write_text(text)
        assert write_recipe(run.run_dir, dump_config(config), 7) == text
        assert current.read_text() == dump_config(config)
    names = ["config.step_00000007.yaml", "config.step_00000007-2.yaml", "config.step_00000007-3.yaml"]
    assert [(run.run_dir / name).read_text() for name in names] == ["first", "second", "third"]
    assert len(list(run.run_dir.iterdir())) == 4


def test_recipes_of_other_versions_are_compared(run: Run) -> None:
    config = load_config(run.write_recipe())
    values: dict[str, Any] = json.loads(json.dumps(parse_yaml(dump_config(config), "")))
    del values["loss_norm"]
    assert recipe_changes(json.dumps(values), dump_config(config)) == {}, "a key that is new has its default"
    values["optim"]["momentum"] = 0.5
    assert recipe_changes(json.dumps(values), dump_config(config)).keys() == {"loss_norm", "optim.momentum"}
    assert list(recipe_changes("no: [recipe", dump_config(config))) == [""]


def test_long_changes_are_shortened() -> None:
    text = describe_changes({f"key{index}": [["x" * 1000] * 1000, None] for index in range(30)})
    assert len(text) < MOST_SHOWN * 1000
    assert "and 10 more" in text
    assert "more" not in describe_changes({f"key{index}": [1, 2] for index in range(MOST_SHOWN)})


@pytest.mark.parametrize("every", [1000, 4])
@pytest.mark.parametrize("last", [False, True])
def test_a_stage_that_is_shortened_to_where_it_was_saved_is_evaluated_at_its_end(
    run: Run, last: bool, every: int
) -> None:
    """Also by what was not due where another evaluation was; a stage that follows may refer to what was found there."""
    position_wise = {"bucket": 16, "sequences": 4, "every": 1000}
    evaluation = {"every": every, "sequences": 4, "position_wise": position_wise}
    run.recipe["evaluation"] = evaluation
    for stage in run.recipe["stages"]:
        stage |= {"seq_len": 64, "micro_batch_size": 4}
    recovered = {"tolerance": 9.0, "reference": "before"}
    run.recipe["stages"][1]["until"] = {"trailing_loss_recovered": recovered, "max_tokens": 6144}
    if last:
        del run.recipe["stages"][1]
    assert run.train_here("--stop-at-step", "4") == 0
    assert not run.records("position_wise")
    run.recipe["stages"][0]["tokens"] = 2048
    for _ in range(2):
        assert run.train_here() == 0
    ends = [4] if last else [4, 4 + run.recipe["stages"][1]["tokens"] // 512]
    assert [record["step"] for record in run.records("position_wise")] == ends
    assert {record["step"] for record in run.records("validation_loss")} >= {*ends}


def test_a_stage_whose_tokens_now_end_where_it_was_saved_is_judged_by_its_criterion_there(run: Run) -> None:
    until = {"metric": "eval_loss", "at_most": 100.0, "max_tokens": 20 * 512}
    run.recipe["stages"] = [run.recipe["stages"][0] | {"tokens": 8 * 512, "until": until}]
    run.recipe["evaluation"]["every"] = 1000
    assert run.train_here("--stop-at-step", "4") == 0
    run.recipe["stages"][0]["tokens"] = 4 * 512
    for _ in range(2):
        assert run.train_here() == 0
        assert [record["step"] for record in run.records("stage_exit")] == [4]
        assert run.records()[-1]["step"] == 4


def test_a_stage_that_a_changed_criterion_ends_where_it_was_saved_says_so(run: Run) -> None:
    """The numbers that were found there are compared with the new bound, and each verdict is recorded once."""
    until = {"metric": "eval_loss", "at_most": 0.0, "max_tokens": 20 * 512}
    run.recipe["stages"] = [run.recipe["stages"][0] | {"tokens": 4 * 512, "until": until}]
    run.recipe["evaluation"]["every"] = 4
    assert run.train_here("--stop-at-step", "4") == 0
    until["at_most"] = 100.0
    for _ in range(2):
        assert run.train_here() == 0
    said = [(record["step"], record["message"].partition(":")[0]) for record in run.records("stage_exit")]
    assert said == [(4, "criterion not met"), (4, "criterion met")]
    assert len(run.records("validation_loss")) == 1


def test_the_step_at_which_a_criterion_first_ends_a_stage_has_its_metrics(run: Run) -> None:
    until = {"metric": "eval_loss", "at_most": 100.0, "max_tokens": 20 * 512}
    run.recipe["stages"] = [run.recipe["stages"][0] | {"tokens": 3 * 512, "until": until}]
    run.recipe["telemetry"]["log_every"] = 5
    assert run.train_here() == 0
    assert [record["step"] for record in run.records()] == [3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"stages": {0: {"tokens": 4096}}},
            r"the number of steps before stages\[1\] \(tokens .* of stages\[0\]\) was 6 ",
        ),
        ({"data": {"packing": "best_fit"}}, r": data\.packing was 'concat' when it was saved and is 'best_fit' now"),
        (
            {"batch_tokens": 1024},
            r": batch_tokens \(or stages\[0\]\.batch_tokens\) was 512 when .* is 1,?024 now",
        ),
    ],
)
def test_what_may_not_change_is_named_by_the_recipe_s_key(
    run: Run, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train_here("--stop-at-step", "8") == 0
    for key, value in change.items():
        if key == "stages":
            run.recipe["stages"][0] |= value[0]
        else:
            run.recipe[key] = run.recipe[key] | value if isinstance(value, dict) else value
    assert run.train_here() == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("own", [False, True])
def test_a_learning_rate_that_jumps_as_the_run_becomes_longer_is_told(run: Run, own: bool) -> None:
    """As where a stage is added to a finished run, which the end of a run advises."""
    run.recipe["optim"]["schedule"] = {"kind": "cosine", "warmup_tokens": 512, "min_lr_ratio": 0.1}
    assert run.train_here() == 0
    added = run.recipe["stages"][1] | {"name": "longer", "tokens": 40 * 512}
    run.recipe["stages"].append(added | ({"lr": 0.001, "schedule": {"kind": "constant"}} if own else {}))
    step = run.records("metrics")[-1]["step"]
    assert run.train_here("--stop-at-step", str(step + 1)) == 0
    before, after = (record["lr"] for record in run.records("metrics")[-2:])
    told = [record["message"] for record in run.records("warning") if "learning rate" in record["message"]]
    if own:
        assert told == []
    else:
        assert after > 2 * before
        (text,) = told
        assert f"the learning rate was {before:.2e} and goes on with {after:.2e}" in text
        assert "stages[2].lr" in text


def test_a_learning_rate_that_warms_up_is_no_jump(run: Run) -> None:
    """It doubles from the first step to the second, whatever else has changed."""
    run.recipe["optim"]["schedule"] = {"kind": "wsd", "warmup_tokens": 4 * 512, "decay_tokens": 4 * 512}
    total = sum(stage["tokens"] for stage in run.recipe["stages"]) // 512
    for number, step in enumerate((1, 2, total - 2, total - 1)):
        assert run.train_here("--stop-at-step", str(step)) == 0
        run.recipe["telemetry"]["log_every"] = 2 + number
    assert run.train_here() == 0
    assert len(run.records("recipe")) == 4
    assert not [record for record in run.records("warning") if "learning rate" in record["message"]]
