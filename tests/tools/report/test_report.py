"""`moba-train report` says what a run's folder says, also when it is damaged, large, or from elsewhere."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moba_train.errors import UserError
from moba_train.evals.registry import EVALUATIONS
from moba_train.foreign_files import ROOTS
from moba_train.telemetry.jsonl import JsonlSink
from moba_train.telemetry.telemetry import Telemetry
from moba_train.tools.cli import app
from moba_train.tools.report.facts import Fact, facts
from moba_train.tools.report.history import MOST_POINTS, Result, read_history, shown_rows
from moba_train.tools.report.page import render, write_evaluation, write_report
from moba_train.tools.report.training_charts import data_mix
from tests.commands import run_app

Change = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def page_data(page: str) -> dict[str, Any]:
    """What the page's program draws."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


def charts(run: Path) -> dict[str, dict[str, Any]]:
    return {chart["key"]: chart for chart in page_data(render([read_history(run)], 2e9))["charts"]}


def names(chart: dict[str, Any]) -> list[str]:
    return [trace["name"] for trace in chart["traces"]]


def test_the_command_writes_one_small_file(recorded: Path) -> None:
    result = run_app(app, "report", recorded)
    path = recorded / "report.html"
    assert result.stdout.strip() == str(path)
    page = path.read_text()
    assert path.stat().st_size < 5_000_000
    assert "<title>three-stages" in page
    assert re.findall(r"""(?:src|href|url\()\s*=?\s*["']?https?:""", page) == []


def test_every_part_of_the_run_is_there(recorded: Path) -> None:
    found = charts(recorded)
    assert names(found["loss"]) == [
        "each step",
        "training loss",
        "validation loss",
        "trailing loss",
        "trailing loss, full attention",
        "spike",
        "rollback",
        "fault",
        "restart",
    ]
    by_name = {trace["name"]: trace for trace in found["loss"]["traces"]}
    assert by_name["spike"]["axes"]["step"] == [48, 96]
    assert by_name["rollback"]["axes"]["step"] == [96]
    assert by_name["restart"]["axes"]["step"] == [85, 125]
    assert [(mark["label"], mark["axes"]["step"]) for mark in found["loss"]["marks"]] == [
        ("short", [0]),
        ("activate", [70]),
        ("long", [110]),
    ]
    assert {"throughput", "lr", "grad-norm", "data-mix", "batches", "step-time"} <= found.keys()
    own = [trace["name"] for trace in found["position-wise"]["traces"] if trace.get("showlegend", True)]
    assert own == ["short, full (step 70)"] + [
        f"{stage}, {kind} (step {step})"
        for stage, step in (("activate", 110), ("long", 150))
        for kind in ("moba", "full")
    ]
    assert {
        "needle-0-0-moba",
        "needle-0-0-full",
        "selected-0",
        "gate-covers",
        "gate-decides",
        "gate-margin",
        "gate-distance-0",
    } <= found.keys()
    assert {"ruler-0-moba-teacher-forced", "ruler-0-full-teacher-forced"} <= found.keys()


def test_curves_are_the_recorded_numbers(recorded: Path) -> None:
    records = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["type"] == "metrics"]
    page = page_data(render([read_history(recorded)], 2e9))
    each = page["charts"][0]["traces"][0]
    assert page["axes"]["run-0"]["step"] == [record["step"] for record in steps]
    losses = [record["loss"] if math.isfinite(record["loss"]) else None for record in steps]
    assert losses.count(None) == 1  # the overflow
    assert each["y"] == [None if loss is None else pytest.approx(loss, rel=1e-6) for loss in losses]
    hours = page["axes"]["run-0"]["hours"]
    assert hours[-1] == pytest.approx((steps[-1]["time"] - records[0]["time"]) / 3600, rel=1e-6)


def test_a_needle_map_has_its_lengths_depths_and_the_trained_length(recorded: Path) -> None:
    evaluation = json.loads((recorded / "evaluations" / "step_00000150-256.json").read_text())["needle"]
    chart = charts(recorded)["needle-0-0-moba"]
    (heat,) = chart["traces"]
    assert np.array(heat["z"]).T.tolist() == evaluation["maps"]["moba"]["passed"]
    assert heat["x"] == ["64", "128", "256", "512"]
    assert heat["y"][0] == "0 %"
    assert chart["layout"]["yaxis"]["autorange"] == "reversed"
    assert chart["layout"]["shapes"][0]["x0"] == 2.5  # between 256, which was trained, and 512


def test_notes_say_how_an_earlier_version_asked_in_another_way(recorded: Path) -> None:
    (path,) = (recorded / "evaluations").glob("*.json")
    assert ": 8 samples per cell." in render([read_history(recorded)], 2e9)
    found = json.loads(path.read_text())
    found["needle"] |= {"keys": 4, "seed": 7, "haystack": "synthetic"}
    found["ruler"]["seed"] = 8
    path.write_text(json.dumps(found))
    page = render([read_history(recorded)], 2e9)
    assert ": 1 of 4 needles, 8 samples per cell, seed 7, synthetic haystack." in page
    assert ": 8 samples of each task and length, seed 8." in page


def test_evaluations_in_training_are_drawn_as_those_of_the_command(recorded: Path) -> None:
    """Their events hold the data under the names that the evaluations give."""
    drawn = charts(recorded)
    (path,) = (recorded / "evaluations").glob("*.json")
    found = json.loads(path.read_text())
    path.unlink()
    fields = {evaluation.name: evaluation.data_name or evaluation.name for evaluation in EVALUATIONS.values()}
    assert all(field.startswith(name) for name, field in fields.items())
    place = {key: found[key] for key in ("step", "tokens", "stage", "time")}
    events = [{"type": name, "message": "", **place, fields[name]: found[name]} for name in found["tasks"]]
    with (recorded / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)
    now = charts(recorded)
    assert now.keys() == drawn.keys()
    assert {"needle-0-0-moba"} < now.keys()


def test_the_tiles(recorded: Path) -> None:
    page = render([read_history(recorded)], 2e9)
    tiles = re.findall(r'<p class="label">(.*?)</p>\s*<p class="value">(.*?)</p>\s*<p class="detail">(.*?)</p>', page)
    values = {label: (value, detail) for label, value, detail in tiles}
    assert values["steps, finished"] == ("150 / 150", "76.8K tokens")
    assert values["restarts"] == ("2", "2 spikes, 1 rollback")
    assert {"training loss", "validation loss", "trailing loss", "tokens/s", "time"} <= values.keys()


def tiles(run: Path) -> dict[str, Fact]:
    return {fact.label: fact for fact in facts(read_history(run), 2e9)}


def test_a_run_whose_last_stage_met_its_criterion_is_finished(recorded: Path) -> None:
    path = recorded / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stage = records[-1]["stage"]
    kept = [record for record in records if record["step"] <= 140]
    met = {"type": "stage_exit", "step": 140, "stage": stage, "tokens": kept[-1]["tokens"], "time": kept[-1]["time"]}
    for message, label in (("criterion not met", "steps so far"), ("criterion met: ...", "steps, finished")):
        path.write_text("".join(f"{json.dumps(record)}\n" for record in [*kept, met | {"message": message}]))
        assert tiles(recorded)[label].value == "140 / 150"
    (recorded / "config.yaml").write_text("stages: [3]")
    assert "steps so far" in tiles(recorded)


def test_the_devices_are_those_of_the_last_step(recorded: Path, change_records: Change) -> None:
    """Resumed on eight in place of four for the last three steps."""

    def change(record: dict[str, Any]) -> None:
        if record["type"] == "metrics":
            devices = 8 if record["step"] > 147 else 4
            record.update(tokens_per_s=1000.0 * devices, tokens_per_s_per_device=1000.0)

    change_records(recorded, change)
    assert tiles(recorded)["tokens/s"].detail.startswith("8 devices")


def test_lm_eval_shows_shares_of_which_more_is_better(recorded: Path) -> None:
    scores = {"moba": {"wikitext": {"bits_per_byte,none": 0.81}, "lambada": {"acc,none": 0.41, "acc_stderr,none": 0.1}}}
    found = Result("lm_eval", 150, "", 0.0, {"scores": scores}, "file.json")
    history = read_history(recorded)
    history.results.append(found)
    page = page_data(render([history], 2e9))
    (chart,) = [chart for chart in page["charts"] if chart["key"].startswith("lm-eval")]
    assert chart["traces"][0]["z"] == [[0.41]]


@pytest.mark.parametrize("cut", [1, 40, 0.5])
def test_a_run_that_is_being_written_is_drawn_with_a_notice(recorded: Path, cut: float) -> None:
    path = recorded / "metrics.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * cut) if cut < 1 else -int(cut) - 1])
    history = read_history(recorded)
    assert history.notices == ["the last line of metrics.jsonl is incomplete: the run is writing it, or was killed"]
    assert "loss" in charts(recorded)


def test_damage_is_a_notice(recorded: Path) -> None:
    path = recorded / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[40] = b"\x00\xff\x00 not JSON\n"
    lines[41] = b'{"type": "metrics", "step": "many"}\n'
    lines[42] = b'{"type": "metrics", "step": 3, "tokens": null, "time": 1}\n'
    lines[43] = b'{"type": "metrics", "step": 3, "tokens": 1' + b"0" * 400 + b', "time": 1}\n'
    lines[44] = b'{"type": "code", "step": 3, "tokens": 1, "time": 1795856400000}\n'  # milliseconds
    path.write_bytes(b"".join(lines))
    (recorded / "config.yaml").write_text("a: [")
    (recorded / "evaluations" / "step_00000001-64.json").write_text('{"tasks": ["needle"]')
    (recorded / "evaluations" / "step_00000002-64.json").write_text('["needle"]')
    report = write_report([recorded])
    assert report.notices[0] == "metrics.jsonl: damaged lines, which are left out: 41-45"
    assert report.notices[1].startswith("config.yaml cannot be read: ")
    assert [notice.split(" cannot")[0] for notice in report.notices[2:]] == [
        "evaluations/step_00000001-64.json",
        "evaluations/step_00000002-64.json",
    ]
    assert all(notice.split(":")[0] in report.path.read_text() for notice in report.notices)


def test_texts_that_utf_8_does_not_have_are_shown_escaped(recorded: Path, change_records: Change) -> None:
    """A lone surrogate is valid in JSON and YAML, and stands for a byte of a file name in another encoding."""
    bad = "a\ud800b"

    def spoil(record: dict[str, Any]) -> None:
        record |= {key: bad for key in ("stage", "message", "title") if key in record}

    change_records(recorded, spoil)
    (recorded / "config.yaml").write_text('name: "a\\uD800b"\ndata: {"k\\uD800": "v\\uD800"}\n')
    folder = recorded.rename(os.fsdecode(os.fsencode(recorded) + b"-\xff"))
    page = write_report([folder]).path.read_text()
    assert "a\\ud800b" in page
    assert "-\\udcff" in page


def test_results_of_another_form_cost_their_chart_only(recorded: Path, change_records: Change) -> None:
    def spoil(record: dict[str, Any]) -> None:
        if record["type"] == "position_wise":
            record["position_wise"]["curves"] = [3, "x"]

    change_records(recorded, spoil)
    history = read_history(recorded)
    page = render([history], 2e9)
    assert [notice.split(":")[0] for notice in history.notices] == ["the chart of position cannot be drawn"]
    assert "loss" in {chart["key"] for chart in page_data(page)["charts"]}


@pytest.mark.parametrize("content", ["", "\n", "\x00" * 300, '{"type": "code", "step": 0, "tokens": 0, "time": 5}\n'])
def test_a_run_without_steps_has_a_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    report = write_report([tmp_path])
    assert "metrics.jsonl holds no training step yet" in report.notices
    assert "no training step yet" in report.path.read_text()


def test_numbers_that_are_not_finite_are_gaps(recorded: Path, change_records: Change) -> None:
    change_records(recorded, lambda record: record.update(loss=float("nan")) if record["step"] == 20 else None)
    assert charts(recorded)["loss"]["traces"][0]["y"][19] is None


def test_the_load_of_experts_is_that_of_the_last_step_that_has_it(recorded: Path, change_records: Change) -> None:
    def add(record: dict[str, Any]) -> None:
        if record["step"] in (20, 30):
            record |= {"expert_load_layer_3": [50.0, 150.0], "expert_load_layer_11": [float(record["step"]), 170.0]}
        elif record["step"] == 40:  # from elsewhere
            record |= {"expert_load_layer_3": [10**400, "a"], f"expert_load_layer_{'9' * 5000}": [1.0]}

    assert "expert-load-0" not in charts(recorded)
    change_records(recorded, add)
    chart = charts(recorded)["expert-load-0"]
    assert chart["traces"][0]["y"] == ["layer 3", "layer 11"]
    assert chart["traces"][0]["z"] == [[0.5, 1.5], [0.3, 1.7]]


def test_a_probe_that_found_no_choice_has_no_chart(recorded: Path) -> None:
    path = recorded / "evaluations" / "step_00000150-256.json"
    results = json.loads(path.read_text())
    assert results["gate_probe"]["layers"]
    results["gate_probe"]["layers"] = []
    path.write_text(json.dumps(results))
    history = read_history(recorded)
    page = page_data(render([history], 2e9))
    assert not [notice for notice in history.notices if "cannot be drawn" in notice]
    assert not [chart for chart in page["charts"] if chart["key"].startswith("gate-")]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; give the run_dir"):
        read_history(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file; give the run_dir"):
        read_history(tmp_path)
    result = run_app(app, "report", tmp_path, code=2)
    assert "Traceback" not in result.output


def test_names_and_messages_are_text(recorded: Path, change_records: Change) -> None:
    """A run folder from elsewhere cannot put markup or programs into the page."""
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"

    def poison(record: dict[str, Any]) -> None:
        record["stage"] = bad
        record |= {name: bad for name in ("message", "machine") if name in record}

    change_records(recorded, poison)
    recipe = yaml.safe_load((recorded / "config.yaml").read_text())
    recipe |= {"name": bad, bad: bad}
    recipe["data"]["train"][0]["path"] = bad
    (recorded / "config.yaml").write_text(yaml.safe_dump(recipe))
    page = render([read_history(recorded)], 2e9)
    assert page.count("<script") == 3  # data, plotly and program
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None
    assert "script-src &#39;sha256-" in policy[1]
    assert "script-src &#39;unsafe-inline" not in policy[1]


def test_links_out_of_the_run_folder_are_not_followed(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROOTS)
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: rosebud")
    (recorded / "config.yaml").unlink()
    (recorded / "config.yaml").symlink_to(secret)
    report = write_report([recorded])
    assert "rosebud" not in report.path.read_text()
    assert any(notice.startswith("config.yaml cannot be read") for notice in report.notices)


def test_several_runs_lie_over_each_other_with_the_keys_that_differ(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_bytes((recorded / "metrics.jsonl").read_bytes())
    recipe = yaml.safe_load((recorded / "config.yaml").read_text())
    recipe["optim"]["lr"] = 0.25
    (other / "config.yaml").write_text(yaml.safe_dump(recipe))
    report = write_report([recorded, other], tmp_path / "both.html")
    assert report.path == tmp_path / "both.html"
    page = report.path.read_text()
    assert [f"three-stages ({folder})</label>" in page for folder in (recorded, other)] == [True, True]
    loss = page_data(page)["charts"][0]
    assert {trace["meta"]["run"] for trace in loss["traces"]} == {0, 1}
    table = page.split("Keys that differ")[1].split("</table>")[0]
    assert re.findall(r'<th scope="row">(.*?)</th>', table) == ["optim.lr"]
    assert re.findall(r"<td>(.*?)</td>", table) == ["0.006", "0.25"]


def test_every_stage_has_one_beginning(tmp_path: Path) -> None:
    """A stage may begin again, changed, and records may be lost."""
    events = [
        ("resume", 2, "lost", 16),
        ("stage", 4, "one", 32),
        ("resume", 5, "one", 32),
        ("stage", 8, "two", 64),
        ("resume", 8, "one", 32),
        ("stage", 8, "two", 128),
        ("resume", 9, "two", 128),
    ]
    telemetry = Telemetry([JsonlSink(tmp_path / "metrics.jsonl", None)])
    for event_type, step, stage, seq_len in events:
        telemetry.stage = stage
        telemetry.event(step, step * 512, event_type, "a message", seq_len=seq_len)
    telemetry.close()
    found = [(stage["stage"], stage["step"], stage["seq_len"]) for stage in read_history(tmp_path).stages]
    assert found == [("lost", 2, 16), ("one", 4, 32), ("two", 8, 128)]


def test_a_long_run_keeps_its_spikes(tmp_path: Path) -> None:
    telemetry = Telemetry([JsonlSink(tmp_path / "metrics.jsonl", None)])
    for step in range(1, 20_001):
        high = 9.0 if step == 7777 else 0.0
        telemetry.log(step, step * 512, {"loss": 2 + 3 / step + high, "grad_norm": 50.0 if step == 12_345 else 1.0})
    telemetry.close()
    history = read_history(tmp_path)
    rows = shown_rows(history, 1)
    assert len(rows) <= MOST_POINTS + 2
    assert {7777 - 1, 12_345 - 1, 0, 19_999} <= set(rows.tolist())
    assert len(shown_rows(history, 4)) < len(rows) / 2


def test_an_evaluation_alone_has_a_page(recorded: Path, tmp_path: Path) -> None:
    """As `moba-train eval --output` writes it, with the same charts as the report of the run."""
    (file,) = (recorded / "evaluations").glob("*.json")
    found = page_data(write_evaluation(json.loads(file.read_text()), tmp_path).read_text())["charts"]
    by_key = {chart["key"]: chart for chart in found}
    assert {"needle-0-0-moba", "selected-0", "ruler-0-full-teacher-forced", "gate-covers"} <= by_key.keys()
    drawn = charts(recorded)
    assert all(chart["traces"] == drawn[key]["traces"] for key, chart in by_key.items())


def test_the_lengths_of_documents_are_those_that_each_stage_has_recorded(
    recorded: Path, change_records: Callable[[Path, Callable[[dict[str, Any]], object]], None]
) -> None:
    assert "document-lengths" not in charts(recorded)  # a run of an earlier version
    forged = {"64": 3.0, "8192": 1, "x": 4, "256": "many", "9" * 99: 1, "512": -1}

    def add(record: dict[str, Any]) -> None:
        if record["type"] == "stage":
            record["tokens_by_length"] = forged

    change_records(recorded, add)
    chart = charts(recorded)["document-lengths"]
    assert len(chart["traces"]) == 3
    assert {(tuple(trace["x"]), tuple(trace["y"])) for trace in chart["traces"]} == {((64, 8192), (0.75, 0.25))}
    assert chart["layout"]["xaxis"]["ticktext"] == ["64", "8K"]
    assert charts(recorded)["data-mix"]["layout"]["showlegend"], "also names a single corpus"


def test_the_data_mix_follows_the_weights() -> None:
    common = [{"path": "a", "weight": 3}, {"path": "b"}]
    own = [{"path": "b", "min_length": 200}]
    recipe = {"data": {"train": common}, "stages": [{"name": "one"}, {"name": "two", "train": own}]}
    assert data_mix(recipe) == [("one", {"a": 0.75, "b": 0.25}), ("two", {"b (from 200 tokens)": 1.0})]
    assert data_mix({}) == []
