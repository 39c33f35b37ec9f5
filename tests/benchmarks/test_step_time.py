"""The model behind `plan --nodes` predicts what was measured, and the document shows it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import step_time
from benchmarks.measured_steps import LEFT_OUT, STEPS
from benchmarks.step_time import (
    COMPARED,
    FITTED,
    FITTED_FLOAT8,
    RESULTS,
    all_steps,
    calibrated,
    compare,
    fitted_once,
    left_out,
    logit_bytes,
    rows_of,
    summary,
    table,
)
from moba_train.config.schema import RunConfig
from moba_train.memory.devices import H200
from moba_train.tools.plan.rates import named_gpu, read_rates, shipped_rates
from moba_train.tools.plan.step_time import StageStep
from tests.guide import ROOT
from tests.resolved import plan_of

RATES = shipped_rates(H200)


def test_every_measured_step_is_predicted_within_10_percent() -> None:
    rows = compare()
    assert len(rows) >= len(STEPS)
    assert sum(not row.measured.fit for row in rows) > 2 * sum(row.measured.fit for row in rows)
    assert {row.measured.gpus for row in rows} >= {1, 2}
    far = {f"{row.measured.file} {row.measured.row}": f"{row.error:+.1%}" for row in rows if abs(row.error) > 0.1}
    assert far == {}
    for shown in (summary(rows), table(rows), left_out()):
        assert shown in (ROOT / COMPARED).read_text(), f"python -m benchmarks.step_time --write {COMPARED}"


def test_rates_that_were_calibrated_on_an_h200_predict_its_steps() -> None:
    """benchmarks/measured/planning.md says how well."""
    shown = calibrated(read_rates(RESULTS / "calibrated-h200.json"))
    (last,) = re.findall(r"\| all \| (\d+) \| -([\d.]+)% \| -(\d+)\.\d%", shown)
    text = " ".join((ROOT / COMPARED).read_text().split())
    claim = "its rates predict {} measured training steps {} % too short at the median, {} % at most"
    assert claim.format(*last) in text


def test_rows_that_are_left_out_were_measured() -> None:
    for file, row in LEFT_OUT:
        found = json.loads((RESULTS / file).read_text())
        assert not row or row in found["results"] or row in found["results"]["runs"], (file, row)


def result_file(file: Path, device: str, *rows: str) -> Path:
    """A result of `benchmarks.training` in which every step took one second."""
    settings = {"model": "llama3-8b", "layers": 16, "gpus": 2, "sequences_per_gpu": 1}
    settings |= {"policy": "none", "tp": 1, "cp": 1, "pp": 1, "fp8": "off"}
    measured: dict[str, Any] = {row: {"system": "moba_train", "step_s": {"median": 1.0}} for row in rows}
    measured["64K:full"] = {"system": "moba_train", "error": "out of memory"}
    measured["8K:torchtitan"] = {"system": "torchtitan 0.2.2", "step_s": {"median": 1.0}}
    content = {"date": "2026-11-27", "device": device, "settings": settings, "results": measured}
    file.write_text(json.dumps(content))
    return file


def predicted(file: Path) -> dict[str, StageStep]:
    return {row.measured.row: row.predicted for row in compare(steps=rows_of(file))}


def test_rows_of_another_gpu_are_predicted_with_its_rates(tmp_path: Path) -> None:
    """An H100 multiplies as fast as an H200; its memory has 3.35 TB/s where that of an H200 has 4.8."""
    rows = ("8K:full:none", "8K:full:none:fp8", "64K:moba-512-8:full:cp2", "64K:moba-128-8:full:cp2")
    ours = predicted(result_file(tmp_path / "h200.json", "NVIDIA H200", *rows))
    theirs = predicted(result_file(tmp_path / "h100.json", "NVIDIA H100 80GB HBM3", *rows))
    assert [*ours] == [*theirs] == [*rows]
    slower = 4.8 / 3.35
    for row in rows:
        here, there = ours[row].time, theirs[row].time
        assert (here.products, here.fsdp) == (there.products, there.fsdp)
        assert (there.memory, there.optimizer) == pytest.approx((slower * here.memory, slower * here.optimizer))
        assert here.loss < there.loss < slower * here.loss
        attention = slower if "moba-128" in row else 1
        assert there.attention == pytest.approx(attention * here.attention, rel=1e-3), row
        assert (here.cp < there.cp < slower * here.cp) == ("cp2" in row)
    shown = table(compare(steps=rows_of(tmp_path / "h100.json")))
    assert "| llama3-8b, 16 layers | `8K:full:none` | 2 H100 | 1.000 | " in shown
    with pytest.raises(ValueError, match=r"cpu.json: measured on 'x86_64', which .* does not know"):
        compare(steps=rows_of(result_file(tmp_path / "cpu.json", "x86_64", "8K:full")))


def test_the_rows_of_a_new_result_of_the_8b_model_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = result_file(tmp_path / "training-8b-h100-x2.json", "NVIDIA H100 80GB HBM3", "8K:full", "8K:full:eager")
    monkeypatch.setattr(step_time, "RESULTS", tmp_path)
    assert [row.row for row in all_steps()[len(STEPS) :]] == ["8K:full", "8K:full:eager"]
    monkeypatch.setitem(LEFT_OUT, (new.name, "8K:full:eager"), "measured beside other programs")
    assert [row.row for row in all_steps()[len(STEPS) :]] == ["8K:full"]
    monkeypatch.setitem(LEFT_OUT, (new.name, ""), "measured beside other programs")
    assert all_steps() == [*STEPS]


def test_every_way_to_divide_a_step_is_predicted(tmp_path: Path) -> None:
    """Two GPUs by tp, cp and pp: what each exposes, from the bytes and the links."""
    plain, pipeline = "8K:full:none", "8K:full:none:pp2:batch8:micro1"
    tensor = "8K:full:none:tp2:batch2"
    rows = [plain, tensor, f"{tensor}:parallel.tp_overlap=true", pipeline]
    rows += [f"{pipeline}:parallel.pp_schedule=interleaved_1f1b", f"{pipeline}:eager"]
    rows += [f"{pipeline}:eager:parallel.pp_schedule=zero_bubble", "64K:full:full:cp2:parallel.cp_transport=ulysses"]
    rows += [
        "64K:full:full:cp2",
        "64K:full:budget:cp2",
        "64K:full:full:offload:cp2",
        "8K:full:selective",
        "8K:full:full",
        "8K:full:budget",
    ]
    steps = predicted(result_file(tmp_path / "h100.json", "NVIDIA H100 80GB HBM3", *rows))
    of = {row: step.time for row, step in steps.items()}

    hidden, weight = 8192 * 4096 * 2, 128256 * 4096 * 2
    assert of[tensor].tp == pytest.approx(2 * (16 * 8 * hidden + 2 * weight) / 2 / 300e9)
    assert of[rows[2]].tp == pytest.approx(2 * (16 * 2 * hidden + 2 * weight) / 2 / 300e9)
    assert of[tensor].fsdp == 0 < of[plain].fsdp

    # 8 micro-batches of two ranks: an eighth of a step for its ends, half or a third of that by the other schedules,
    # and 5 % for ranks that are not equal. The step includes the optimizer, which has no ends.
    for row, ends in zip(rows[3:7], (1, 1 / 2, 1, 1 / 3), strict=True):
        computed = of[row].seconds - of[row].pp
        assert 0.96 * ends / 8 < of[row].pp / computed < ends / 8 + 0.07, row

    # Tokens change for heads: 6 x 8192 bytes for each of half of the tokens, and 3 x 4096; half of that travels.
    exchanged = 32768 * (6 * 8192 + 3 * 4096) / 2 * 16
    copies = of[rows[7]].cp - exchanged / 300e9
    assert 0 < copies < exchanged / 300e9
    assert steps[rows[7]].traffic["cp"].node == pytest.approx(exchanged)

    repeated = [of[row].repeated for row in (plain, "8K:full:budget", "8K:full:selective", "8K:full:full")]
    assert repeated[0] == repeated[1] == 0 < repeated[2] < repeated[3]
    # Of 6 operations a weight, full repeats 2 of the projections' and of two thirds of the feed-forward's.
    products = 16 * 2 * 8192 * (41.9e6 + 2 / 3 * 176.2e6) / RATES.products
    assert repeated[3] - repeated[2] == pytest.approx(products, rel=0.01)
    assert 0 < of["64K:full:budget:cp2"].repeated < of["64K:full:full:cp2"].repeated
    assert of["64K:full:full:offload:cp2"] == of["64K:full:full:cp2"]
    assert steps["64K:full:full:offload:cp2"].activations.host_bytes > 0


def test_any_result_of_training_can_be_compared() -> None:
    """The rows of a file name their own options; what they leave out is in its settings."""
    file = RESULTS / "training-8b-h200-x2.json"
    rows = {row.measured.keys: row for row in compare(steps=rows_of(file))}
    for name, key in LEFT_OUT:
        if name == file.name:
            del rows[(key,)]
    listed = {row.measured.keys: row for row in compare() if row.measured.file == file.name}
    assert rows.keys() == listed.keys()
    for keys, row in rows.items():
        assert (row.seconds, row.predicted.time) == (listed[keys].seconds, listed[keys].predicted.time)


def test_the_rates_are_those_that_the_fit_finds() -> None:
    again = fitted_once(RATES)
    for name in (*FITTED, *FITTED_FLOAT8):
        assert getattr(again, name) == pytest.approx(getattr(RATES, name), rel=0.02), name
    for name, found in logit_bytes(RATES).items():
        assert getattr(RATES, name) == pytest.approx(found, rel=0.02), name


def test_another_gpus_rates_are_scaled_by_its_peak_or_by_its_memory() -> None:
    for name, peak, bandwidth in (("b200", 2250 / 989, 8 / 4.8), ("h100", 1, 3.35 / 4.8), ("l40s", 362 / 989, 0.18)):
        found = shipped_rates(named_gpu(name))
        assert found.products / RATES.products == pytest.approx(peak)
        assert found.float8_products is not None
        assert RATES.float8_products is not None
        assert found.float8_products / RATES.float8_products == pytest.approx(peak)
        assert found.memory / RATES.memory == pytest.approx(bandwidth)
        assert RATES.update_s["adamw"] / found.update_s["adamw"] == pytest.approx(bandwidth)
        assert RATES.update_s["muon"] / found.update_s["muon"] == pytest.approx(peak)
        for kind, block_size, speed in (("full", None, peak), ("moba", 4096, peak), ("moba", 128, bandwidth)):
            for ours, theirs in zip(RATES.attention, found.attention, strict=True):
                if (ours.kind, ours.options.get("block_size")) == (kind, block_size):
                    expected = min(speed, 236 / 128 * peak) if block_size == 128 else speed
                    assert ours.both_ms / theirs.both_ms == pytest.approx(expected, rel=1e-3), (name, ours)


def test_stages_of_sparsify_are_predicted_as_the_document_says() -> None:
    """On one GPU without flash-attn-4, each sequence a single document."""
    model = yaml.safe_load((ROOT / "configs/models/smollm2-135m.yaml").read_text())["model"]
    model["rope"] = {"kind": "abf", "theta": 1e6}
    options = {"block_size": 128, "topk": 32, "kl_weight": 0.1, "kl_every": 8, "index_keys": "group"}
    gate: dict[str, Any] = {"default": "msa", "full_layers": [17, 18, 20], "msa": options}
    recipe = {"name": "arm", "run_dir": "runs/arm", "data": {"train": [{"path": "a"}]}, "batch_tokens": 131072}
    stages: dict[str, dict[str, Any]] = {
        "full attention": {"attention": {"default": "full"}},
        "the gate's warm-up": {"attention": gate | {"msa": options | {"mode": "warmup"}}},
        "sparse, with a teacher": {"attention": gate, "distill": {"teacher": "full", "weight": 0.5}},
    }
    steps: list[StageStep] = []
    for own in stages.values():
        stage = {"name": "only", "seq_len": 32768, "tokens": "5M"} | own
        arm = recipe | {"model": model, "attention": own["attention"], "stages": [stage]}
        steps += plan_of(RunConfig.model_validate(arm), 1, full_by_torch=True).steps
    (run,) = json.loads((RESULTS / "sparsify-fifth-h200.json").read_text())["results"]
    of_arm = {arm: seeds[0]["stages"] for arm, seeds in run["arms"].items()}
    measured = (of_arm["full"]["dense"], of_arm["sparse"]["dense"], of_arm["sparse"]["sparse"])
    text = (ROOT / COMPARED).read_text()
    for name, step, found in zip(stages, steps, measured, strict=True):
        times = f"| {name} | {found['step_s']:.2f} | {step.time.seconds:.2f} | "
        (rest,) = re.findall(f"{re.escape(times)}(.*) \\|$", text, re.MULTILINE)
        _, memory = rest.split(" | ")
        assert memory == f"{step.memory / 2**30:.1f}", name
        assert -0.18 < step.time.seconds / found["step_s"] - 1 < 0.05, name
