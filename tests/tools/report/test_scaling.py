"""Scaling fits: the law that made the losses is found again, within intervals that hold it as often as they promise."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import dump_config
from moba_train.config.schema import RunConfig
from moba_train.data.loss_mask import mask_prefix
from moba_train.errors import DataError, UserError
from moba_train.tools.cli import app
from moba_train.tools.report.scaling import PowerLaw, fit_power_law, fit_runs
from moba_train.tools.report.scaling_report import describe, report_json
from moba_train.tools.report.scaling_runs import PFLOPS_DAY, read_runs
from moba_train.train import main
from tests.commands import run_app

A, B = 2.625, -0.063
"""The form of the fits in MoBA's paper."""
COMPUTE = np.geomspace(1e-3, 10, 12)


def noisy(rng: np.random.Generator) -> np.ndarray:
    return A * COMPUTE**B * np.exp(rng.normal(0, 0.004, len(COMPUTE)))


def test_a_law_without_noise_is_found_exactly() -> None:
    fit = fit_power_law(COMPUTE, A * COMPUTE**B)
    assert (float(fit.law.a), float(fit.law.b)) == pytest.approx((A, B))
    assert fit.law(1e6) == pytest.approx(A * 1e6**B)


def test_a_law_with_noise_is_within_its_intervals() -> None:
    loss = noisy(np.random.default_rng(3))
    fit = fit_power_law(COMPUTE, loss, resamples=500)
    for name, value in {"a": A, "b": B}.items():
        low, high = fit.interval(attrgetter(name), 0.95)
        assert low < value < high, name
        assert low < float(getattr(fit.law, name)) < high
    assert np.array_equal(fit.samples.b, fit_power_law(COMPUTE, loss, resamples=500).samples.b)
    assert not np.array_equal(fit.samples.b, fit_power_law(COMPUTE, loss, resamples=500, seed=1).samples.b)


def test_intervals_hold_the_law_about_as_often_as_they_promise() -> None:
    rng = np.random.default_rng(0)
    held = {0.95: 0, 0.5: 0}
    for trial in range(400):
        fit = fit_power_law(COMPUTE, noisy(rng), resamples=400, seed=trial)
        for confidence in held:
            low, high = fit.interval(lambda law: law.b, confidence)
            held[confidence] += low <= B <= high
    assert 0.88 <= held[0.95] / 400 <= 0.98
    assert 0.42 <= held[0.5] / 400 <= 0.58


@pytest.mark.parametrize(
    ("count", "different", "message"),
    [
        (2, 2, r"2 runs given; allowed: at least 3 for L = a \* C\^b"),
        (4, 1, "1 compute given; allowed: at least 2 different ones"),
    ],
)
def test_too_few_runs_are_refused(count: int, different: int, message: str) -> None:
    compute = [1e-3 * 10 ** (index % different) for index in range(count)]
    with pytest.raises(UserError, match=message):
        fit_power_law(compute, [3.0] * count)


def config(folder: Path, kind: str, width: int, **changes: Any) -> RunConfig:
    shape = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
    }
    sources = [{"path": str(folder / "corpus")}]
    recipe = {
        "name": f"{kind}-{width}",
        "run_dir": str(folder / f"{kind}-{width}"),
        "model": shape,
        "attention": {"default": kind, "moba": {"block_size": 8, "topk": 2}},
        "data": {"train": sources, "validation": sources},
        "batch_tokens": 128,
        "stages": [{"name": "only", "seq_len": 64, "tokens": 128 * width}],
        "evaluation": {"sequences": 2, "position_wise": {"bucket": 16, "sequences": 2}},
        "telemetry": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
        **changes,
    }
    return RunConfig.model_validate(recipe)


def non_embedding(width: int) -> int:
    """Parameters of the models above by hand: q and o, k and v of half the width, SwiGLU, three norms."""
    return 2 * width**2 + 2 * width * width // 2 + 3 * width * 2 * width + 3 * width


def write_run(folder: Path, made: RunConfig, eval_loss: float, steps: int | None = None) -> Path:
    """A run folder as the trainer leaves it, with the losses that a test wants."""
    last = made.stages[0].tokens // 128 if steps is None else steps
    run = Path(made.run_dir)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(made))
    place = {"time": 0.0, "stage": "only"}
    records = [
        {
            "type": "metrics",
            "step": step,
            "tokens": 128 * step,
            **place,
            "loss": eval_loss + (0.5 if step < 3 else 0.01),
        }
        for step in range(1, last + 1)
    ]
    final = {"step": last, "tokens": 128 * last, **place, "message": ""}
    records.append({"type": "validation_loss", **final, "eval_loss": eval_loss})
    records.append({"type": "position_wise", **final, "trailing_loss": eval_loss + 0.1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def law_of(kind: str) -> float:
    return A if kind == "full" else A + 0.05


def write_runs(folder: Path, widths: tuple[int, ...] = (8, 12, 16, 24)) -> list[Path]:
    """Runs whose losses are exact power laws of 6ND, MoBA's a constant factor above full attention's."""
    runs = []
    for kind in ("full", "moba"):
        for width in widths:
            compute = 6 * non_embedding(width) * 128 * width / PFLOPS_DAY
            runs.append(write_run(folder, config(folder, kind, width), law_of(kind) * compute**B))
    return runs


def test_runs_become_points_and_groups_are_compared(tmp_path: Path) -> None:
    runs = read_runs(write_runs(tmp_path), ["eval_loss", "loss", "trailing_loss"], last_steps=5)
    assert [run.group for run in runs] == ["full"] * 4 + ["moba"] * 4
    assert runs[1].parameters == non_embedding(12)
    assert runs[1].tokens == 128 * 12
    # Both projections' and the output's weights, and 12 H d per attended pair: queries see 32 keys on average here.
    per_token = 6 * (non_embedding(12) - 3 * 12 + 64 * 12) + 12 * 12 * 32
    assert runs[1].compute["real"] * PFLOPS_DAY == pytest.approx(per_token * 128 * 12)
    assert runs[5].compute["real"] < runs[1].compute["real"]
    assert runs[1].losses["loss"] == pytest.approx(runs[1].losses["eval_loss"] + 0.01)
    assert runs[1].losses["trailing_loss"] == pytest.approx(runs[1].losses["eval_loss"] + 0.1)

    report = fit_runs(runs, ["eval_loss"], ["6ND"], resamples=200)
    assert [float(one.fit.law.a) for one in report.fits] == pytest.approx([A, A + 0.05], rel=1e-6)
    assert [float(one.fit.law.b) for one in report.fits] == pytest.approx([B, B])
    (gap,) = report.gaps
    largest = runs[3].compute["6ND"]
    assert (gap.fit.group, gap.reference.group, gap.compute) == ("moba", "full", largest)
    assert gap.value[0] == pytest.approx(0.05 * largest**B)
    assert report.warnings == ["fewer than 8 runs in full, moba: intervals are too narrow, see docs/how-to/evaluate.md"]
    assert json.loads(json.dumps(report_json(report))) == report_json(report)
    assert any("moba above full at 6ND" in line for line in describe(report))
    both = describe(fit_runs(runs, ["eval_loss"], ["6ND", "real"], resamples=100))
    assert "real FLOPs count one document per sequence: corpora not found" in both


def test_every_stage_counts_with_its_own_length_and_tokens(tmp_path: Path) -> None:
    """Queries see 8 keys on average in sequences of 16 tokens, and 32 in those of 64."""
    stages = [{"name": "short", "seq_len": 16, "tokens": 128 * 8}, {"name": "long", "seq_len": 64, "tokens": 128 * 4}]
    folder = write_run(tmp_path, config(tmp_path, "full", 12, stages=stages), 3.0, steps=12)
    (run,) = read_runs([folder], ["eval_loss"], group_by="stages.1.seq_len")
    products = 6 * (non_embedding(12) - 3 * 12 + 64 * 12)
    flops = 128 * (8 * (products + 12 * 12 * 8) + 4 * (products + 12 * 12 * 32))
    assert run.compute["real"] * PFLOPS_DAY == pytest.approx(flops)
    assert run.tokens == 128 * 12
    assert run.group == "stages.1.seq_len=64"


def test_only_groups_of_few_runs_are_said_to_have_too_narrow_intervals(tmp_path: Path) -> None:
    runs = read_runs(write_runs(tmp_path, tuple(range(8, 40, 4))), ["eval_loss"])
    assert fit_runs(runs, ["eval_loss"], ["6ND"], resamples=10).warnings == []
    (warning,) = fit_runs(runs[:-1], ["eval_loss"], ["6ND"], resamples=10).warnings
    assert warning.startswith("fewer than 8 runs in moba: intervals are too narrow")


def test_intervals_of_a_gap_take_groups_as_independent(tmp_path: Path) -> None:
    """Equal runs in two groups differ by nothing, give or take the errors of both."""
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.01, 4))
    runs = [
        write_run(tmp_path, config(tmp_path, kind, width), 3.0 * float(factor))
        for kind in ("full", "moba")
        for width, factor in zip((8, 12, 16, 24), noise, strict=True)
    ]
    (gap,) = fit_runs(read_runs(runs, ["eval_loss"]), ["eval_loss"], ["6ND"]).gaps
    value, low, high = gap.value
    assert value == pytest.approx(0, abs=1e-9)
    assert low < -0.005 < 0.005 < high


def test_what_cannot_be_fitted_is_an_error_with_the_runs_name(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    short = write_run(tmp_path, config(tmp_path / "short", "moba", 32), 3.0, steps=31)
    with pytest.raises(UserError, match=r"moba-32: unfinished: at step 31 of 32; only finished"):
        read_runs([*runs, short], ["eval_loss"])
    with pytest.raises(UserError, match=r"full-8: given twice"):
        read_runs([*runs, runs[0]], ["eval_loss"])
    with pytest.raises(
        UserError, match=r"no evaluation gives 'eval_los' \(did you mean 'eval_loss'\?\); given: loss, eval"
    ):
        read_runs(runs, ["eval_los"])
    (short / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_runs([short], ["eval_loss"])
    with pytest.raises(UserError, match=r"--group-by: given 'attention\.moba\.topp'.*did you mean 'topk'"):
        read_runs(runs, ["eval_loss"], group_by="attention.moba.topp")
    two_of_moba = read_runs(runs[:6], ["eval_loss"])
    with pytest.raises(
        UserError, match=r"group moba: 2 runs given; allowed: at least 3 .*groups: full \(4\), moba \(2\)"
    ):
        fit_runs(two_of_moba, ["eval_loss"], ["6ND"])


def test_a_stage_that_ended_by_its_criterion_is_finished(tmp_path: Path) -> None:
    until = {"metric": "eval_loss", "at_most": 3.5, "max_tokens": 128 * 100}
    stages = [{"name": "only", "seq_len": 64, "tokens": 128 * 8, "until": until}]
    run = write_run(tmp_path, config(tmp_path, "full", 8, stages=stages), 3.0, steps=9)
    with pytest.raises(UserError, match="unfinished: at step 9 of 100"):
        read_runs([run], ["eval_loss"])
    met = {
        "type": "stage_exit",
        "step": 9,
        "tokens": 9 * 128,
        "time": 0.0,
        "stage": "only",
        "message": "criterion met: x",
    }
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(met) + "\n")
    (read,) = read_runs([run], ["eval_loss"])
    assert read.tokens == 9 * 128


def test_runs_on_other_data_are_a_warning_and_any_key_makes_groups(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    other = config(tmp_path / "other", "moba", 32, seed=1)
    other = other.model_copy(update={"data": other.data.model_copy(update={"tokenizer": "other.json"})})
    runs.append(write_run(tmp_path, other, 2.9))
    report = fit_runs(read_runs(runs, ["eval_loss"]), ["eval_loss"], ["6ND"], resamples=100)
    assert [text.split(" differs")[0] for text in report.warnings[:3]] == [
        "data.train",
        "data.validation",
        "data.tokenizer",
    ]
    groups = [run.group for run in read_runs(runs, ["eval_loss"], group_by="seed")]
    assert groups == ["seed=0"] * 8 + ["seed=1"]


def test_corpora_elsewhere_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe in a run folder may be another's."""
    (run,) = write_runs(tmp_path, (8,))[:1]
    (tmp_path / "corpus.idx").write_bytes(b"not an index")
    (tmp_path / "corpus.bin").write_bytes(b"")
    with pytest.raises(DataError, match="corpus"):
        read_runs([run], ["eval_loss"])
    monkeypatch.setenv("MOBA_TRAIN_DATA_ROOTS", str(tmp_path / "run"))
    (read,) = read_runs([run], ["eval_loss"])
    assert read.documents.startswith("one document per sequence: corpora are not below the working folder")
    with pytest.raises(DataError, match="corpus"):
        read_runs([run], ["eval_loss"], data_roots=[tmp_path])


def test_long_conversations_of_a_run_from_before_they_were_refused_are_split(tmp_path: Path) -> None:
    (run,) = write_runs(tmp_path, (8,))[:1]
    with (
        IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer,
        IndexedDatasetWriter(mask_prefix(str(tmp_path / "corpus")), np.uint8) as masks,
    ):
        writer.add_document(np.arange(200) % 64)
        masks.add_document(np.arange(200) % 2)
    (read,) = read_runs([run], ["eval_loss"], data_roots=[tmp_path])
    assert read.documents == "documents of the corpora"


def test_real_runs_through_the_command_line(tmp_path: Path) -> None:
    """Three sizes, trained; table, JSON and charts of two metrics over both computes."""
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for seed in range(8):
            writer.add_document(np.random.default_rng(seed).integers(64, size=200))
    for width in (8, 12, 16):
        recipe = tmp_path / f"{width}.yaml"
        stages = [{"name": "only", "seq_len": 64, "tokens": 128 * width // 4}]
        recipe.write_text(yaml.safe_dump(config(tmp_path, "moba", width, stages=stages).model_dump(exclude_unset=True)))
        assert main([str(recipe)]) == 0
    runs = [str(tmp_path / f"moba-{width}") for width in (8, 12, 16)]
    arguments = ["fit-scaling", *runs, "--metric", "eval_loss,trailing_loss", "--output", str(tmp_path / "fits")]
    run_app(app, *arguments)
    found = json.loads((tmp_path / "fits" / "scaling.json").read_text())
    wanted = [("eval_loss", "6ND"), ("eval_loss", "real"), ("trailing_loss", "6ND"), ("trailing_loss", "real")]
    assert [(fit["metric"], fit["compute"]) for fit in found["fits"]] == wanted
    assert all(fit["b"]["low"] <= fit["b"]["value"] <= fit["b"]["high"] for fit in found["fits"])
    assert {run["documents"] for run in found["runs"]} == {"documents of the corpora"}
    page = (tmp_path / "fits" / "scaling.html").read_text()
    assert all(f'"key":"{metric}-{compute}"' in page for metric, compute in wanted)
    failed = run_app(app, "fit-scaling", *runs[:2], code=2)
    assert "error: group moba: 2 runs given; allowed: at least 3" in failed.output


def test_a_law_is_a_function_of_the_compute() -> None:
    law = PowerLaw(np.array([2.0, 3.0]), np.array([-1.0, -0.5]))
    assert law(4.0).tolist() == [0.5, 1.5]
