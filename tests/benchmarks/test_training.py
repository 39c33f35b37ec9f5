"""The rows of `benchmarks.training` train what they name, one after another, and each result is saved at once."""

import argparse
import json
import math
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import even_experts, random_base, torchtitan_peer, trainer_run, training, training_plot
from benchmarks.random_base import write_base
from benchmarks.trainer_run import model_shape, run_until, write_corpus
from benchmarks.training_rows import Row, parse_row
from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.memory.activations import FILLED
from moba_train.memory.devices import Gpu
from moba_train.telemetry.jsonl import read_records
from tests.resolved import check, stages_of

BEGAN = datetime(2026, 11, 26, 15, 30).timestamp()


def options(tmp_path: Path, **other: Any) -> argparse.Namespace:
    given = {"model": "tiny", "layers": 2, "gpus": 2, "sequences_per_gpu": 1, "rows": []}
    limits = {
        "row_seconds": 60.0,
        "budget_seconds": 60.0,
        "append": False,
        "repetitions": 1,
        "output": tmp_path / "result.json",
    }
    return argparse.Namespace(**given | limits | other)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("8K:full", {"compile": True, "activation_checkpointing": "none", "batch_tokens": 16384}),
        ("8K:full:eager:full", {"compile": False, "activation_checkpointing": "full"}),
        ("8K:full:micro2:batch4", {"micro_batch_size": 2, "batch_tokens": 32768}),
        ("128K:moba-512-8:full:cp2", {"batch_tokens": 131072}),
        ("8K:full:tp2:optim.lr=0.5", {"batch_tokens": 16384}),
        ("8K:full:lora4", {"batch_tokens": 16384}),
    ],
)
def test_a_row_is_a_valid_recipe_that_says_what_the_row_says(text: str, keys: dict[str, Any], tmp_path: Path) -> None:
    row = parse_row(text, Row())
    arguments = options(tmp_path)
    write_base(tmp_path / "base", model_shape("tiny") | {"layers": 2})
    command = training._command(row, tmp_path, arguments)
    config = load_config(tmp_path / "recipe.yaml", list(row.overrides))
    check(config, 2)
    (stage,) = stages_of(config)
    assert {key: getattr(config, key) for key in keys} == keys
    assert command[-len(row.overrides) :] == list(row.overrides) or not row.overrides
    assert (stage.seq_len, config.parallel.cp, config.parallel.tp) == (row.seq_len, row.cp, row.tp)
    assert config.checkpoint.every is None
    assert (config.optim.lr == 0.5) == ("optim.lr=0.5" in text)
    assert (config.adapters.given is not None) == ("benchmarks.random_base" in command) == ("lora4" in text)


def test_attention_of_a_row(tmp_path: Path) -> None:
    row = parse_row("8K:moba-1K-3-last1", Row(cp=2, fp8="rowwise"))
    assert row.label == "MoBA 1024/3, last 1 layers full"
    training._command(row, tmp_path, options(tmp_path))
    config = load_config(tmp_path / "recipe.yaml")
    (stage,) = stages_of(config)
    assert stage.kinds == ("moba", "full")
    assert stage.attention[0].options.model_dump()["block_size"] == 1024
    assert (config.precision.linear, config.precision.fp8.scaling, config.parallel.cp) == ("fp8", "rowwise", 2)


def test_memory_of_a_row_that_fills_the_gpu_is_predicted_for_this_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = parse_row("8K:full:budget", Row())
    whole = training.predict(row, tmp_path, options(tmp_path))["predicted_gib"]
    monkeypatch.setattr(trainer_run, "local_gpu", lambda: Gpu("small", 989.0, whole * training.GIB))
    assert 0.5 * whole < training.predict(row, tmp_path, options(tmp_path))["predicted_gib"] <= FILLED * whole


@pytest.mark.parametrize("text", ["8K:sparse", "8K:full:cp0", "8K:full:fast", "x:full", "8K:torchtitan:packed", "8K"])
def test_an_unknown_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|number|takes"):
        parse_row(text, Row())


def test_defaults_that_torchtitan_does_not_take_are_those_of_our_rows_alone() -> None:
    defaults = Row(policy="budget", pp=2, tp=2, fp8="rowwise", steps=9)
    ours, theirs = (parse_row(text, defaults) for text in ("8K:full", "8K:torchtitan"))
    assert (ours.policy, ours.pp) == ("budget", 2)
    assert (theirs.policy, theirs.pp, theirs.tp, theirs.fp8, theirs.steps) == ("none", 1, 2, "rowwise", 9)
    assert parse_row("8K:torchtitan", Row(policy="full")).policy == "full"
    half = parse_row("8K:torchtitan:memory-budget", Row())
    assert half.policy == "memory_budget"
    assert half.recipe("tiny", Path("corpus"), Path("run"), 2, 1)["activation_checkpointing"] == "full"
    with pytest.raises(
        ValueError, match="memory-budget is of torchtitan alone; allowed: none, selective, full, budget"
    ):
        parse_row("8K:full:memory-budget", Row())
    for option in ("budget", "pp2", "offload", "lora4", "optim.lr=0.5"):
        with pytest.raises(ValueError, match=f"'8K:torchtitan:{option}': torchtitan takes"):
            parse_row(f"8K:torchtitan:{option}", Row())


def test_help_tells_how_a_row_is_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["training", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        training.main()
    assert "\nRows:\n\nLENGTH:ATTENTION, then options in any order:\n\n    ATTENTION " in capsys.readouterr().out


def fake_trainer(folder: Path, steps: int) -> list[str]:
    """A command that writes the metrics of some steps, as the trainer does, and then goes on for ever."""
    records: list[dict[str, Any]] = [
        {"step": n, "type": "metrics", "time": BEGAN + n, "loss": 1.0, "step_s": 9.0 / n, "memory_gib": n}
        for n in range(1, 9)
    ]
    lines = "".join(json.dumps(record | {"tokens_per_s_per_device": 10 * record["step"]}) + "\n" for record in records)
    short = "".join(line + "\n" for line in lines.splitlines()[:steps])
    code = f"import time; open({str(folder / 'run/metrics.jsonl')!r}, 'w').write({short!r}); time.sleep(99)"
    return [sys.executable, "-c", code]


def test_rows_are_killed_when_measured_and_saved_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(row: Row, folder: Path, arguments: argparse.Namespace) -> list[str]:
        if row.seq_len == 2048:
            return [sys.executable, "-c", "raise SystemExit('ValueError: broken')"]
        return fake_trainer(folder, 4 if row.seq_len == 1024 else 1)

    monkeypatch.setattr(training, "_command", command)
    arguments = options(tmp_path, row_seconds=2.0)
    rows = [parse_row(text, Row(warm=1)) for text in ("1K:full:steps2", "2K:full", "4K:full")]
    assert training.run(rows, arguments) == ["2K:full", "4K:full"]
    results = json.loads(arguments.output.read_text())["results"]
    first = results["1K:full:steps2"]
    assert first["step_s"] == {"median": 3.75, "min": 3.0, "max": 4.5, "count": 2}
    assert first["memory_gib"] == 3
    assert first["first_step_s"] == 9.0
    assert first["to_first_step_s"] == pytest.approx(BEGAN + 1 - time.time(), abs=60)
    assert 0 <= first["host_gib"] < 64
    assert 0 < first["predicted_gib"] < 1
    assert first["flops_per_token"] == pytest.approx(first["dense_flops_per_token"], rel=0.01)
    assert "ValueError: broken" in results["2K:full"]["error"]
    assert "not enough to measure after 2 s" in results["4K:full"]["error"]
    assert "| `1K:full:steps2` | 3.750 | 25 |" in capsys.readouterr().out

    training.run([parse_row("8K:full", Row())], options(tmp_path, append=True, budget_seconds=0.0))
    assert json.loads(arguments.output.read_text())["results"].keys() == results.keys()
    assert "not run" in capsys.readouterr().out


def test_rows_are_launched_by_turns_and_their_spread_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[str] = []

    def measure(row: Row, *_: Any) -> dict[str, Any]:
        launched.append(row.name)
        if row.seq_len == 2048:
            return {"wall_s": 0.0, "error": "broken"}
        rate = 100.0 * len(launched)
        return {"wall_s": 0.0, "tokens_per_s_per_device": {"median": rate}, "step_s": {"median": 1.0}}

    monkeypatch.setattr(training, "measure", measure)
    rows = [parse_row(text, Row()) for text in ("1K:full", "2K:full", "1K:torchtitan:memory-budget")]
    arguments = options(tmp_path, repetitions=3)
    assert training.run(rows, arguments) == ["2K:full"]
    names = [row.name for row in rows]
    assert launched == [*names, names[0], names[2], names[0], names[2]], "by turns; what failed is not tried again"
    result = json.loads(arguments.output.read_text())["results"]["1K:full"]
    assert result["rates"] == [100, 400, 600]
    assert result["of_launches"] == {"median": 400, "min": 100, "max": 600, "count": 3}
    assert "| `1K:full` | 1.000 | 400 (100 to 600) |" in capsys.readouterr().out

    training.run(rows[:1], options(tmp_path, append=True))
    result = json.loads(arguments.output.read_text())["results"]["1K:full"]
    assert result["rates"] == [100, 400, 600, 800], "a sitting may be several calls"

    monkeypatch.setattr(training, "measure", lambda *_: {"wall_s": 60.0, "error": "no time left"})
    assert training.run(rows[:1], options(tmp_path, append=True)) == ["1K:full"]
    assert json.loads(arguments.output.read_text())["results"]["1K:full"] == result, "what was measured stays"
    assert "1K:full: no time left (60 s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "told"), [([], ""), (["--layers", "16"], "layers None, not 16"), (["--gpus", "1"], "gpus 2, not 1")]
)
def test_a_file_takes_rows_that_are_measured_alike(
    changed: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it says once for all of them with which model, GPUs and sequences they were measured."""
    monkeypatch.setattr(training, "measure", lambda row, *_: {"wall_s": 0.0, "error": f"none of {row.name}"})
    monkeypatch.setattr(training, "need_gpus", lambda *_: None)
    monkeypatch.setattr(training, "write_corpus", lambda *_: None)
    output = tmp_path / "result.json"
    given = ["training", "--model", "llama3-8b", "--gpus", "2", "--output", str(output)]
    for row, more in (("8K:full", []), ("64K:full", ["--append", "--row-seconds", "60", *changed])):
        monkeypatch.setattr("sys.argv", [*given, "--rows", row, *more])
        with pytest.raises(SystemExit) as ended:
            training.main()
    assert json.loads(output.read_text())["results"].keys() == ({"8K:full"} if told else {"8K:full", "64K:full"})
    assert (ended.value.code == 2) == bool(told)
    assert told in capsys.readouterr().err


def test_clock_and_power_of_a_rows_gpus_are_those_of_the_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what stands for nvidia-smi: sees one sample before the steps, three in them, one after, and one cut short."""
    lines = [
        "2026/11/26 15:29:00.000, 2, 345, 79.96, Not Active",
        "2026/11/26 15:30:02.250, 2, 1500, 690.50, Active",
        "2026/11/26 15:30:02.750, 3, 1980, 400.50, Not Active",
        "2026/11/26 15:30:03.000, 2, 1600, 700.00, Active",
        "2026/11/26 15:30:09.000, 2, 1980, 130.00, Not Active",
        "2026/11/26 15:30:09.200, 2, 19",
    ]
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    code = f"import sys, time; open(sys.argv[-1], 'w').write({chr(10).join(lines)!r}); time.sleep(99)"
    tool.write_text(f'#!/bin/sh\n[ "$2" = 2,3 ] && exec {sys.executable} -c "{code}" "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")

    def command(row: Row, folder: Path, arguments: argparse.Namespace) -> list[str]:
        trainer = fake_trainer(folder, 3)
        return [*trainer[:-1], f"import time; time.sleep(1); {trainer[-1]}"]

    monkeypatch.setattr(training, "_command", command)
    arguments = options(tmp_path)
    training.run([parse_row("1K:full:warm2:steps1", Row())], arguments)
    (result,) = json.loads(arguments.output.read_text())["results"].values()
    assert result["sm_clock_mhz"] == {"median": 1600.0, "min": 1500.0, "max": 1980.0, "count": 3}
    assert result["power_w"]["median"] == 690.5
    assert result["power_capped"] == pytest.approx(2 / 3)


def test_a_run_that_ends_early_is_told(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, pytest.raises(RuntimeError, match="status 3"):
        run_until(lambda: False, [sys.executable, "-c", "print('last words'); exit(3)"], output=log)
    assert (tmp_path / "log").read_text() == "last words\n"


def test_torchtitan_gets_the_shape_and_the_tokens_of_our_recipe(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", "int32") as writer:
        writer.add_document(range(100))
    ranks = [iter(torchtitan_peer.Sequences(str(tmp_path / "corpus"), 8, 2, rank, 2)) for rank in range(2)]
    firsts = [next(batches)[0]["input"][:, 0].tolist() for _ in range(2) for batches in ranks]
    assert firsts == [[0, 8], [16, 24], [32, 40], [48, 56]]
    inputs, labels = next(ranks[0])
    assert (inputs["input"] + 1 == labels).all()

    family, shape = torchtitan_peer.model_arguments(model_shape("llama3-8b"))
    assert family == "llama3"
    base = int(shape["ffn_dim_multiplier"] * int(2 * 4 * shape["dim"] / 3))  # as torchtitan 0.2.2 computes it
    assert shape["multiple_of"] * -(-base // shape["multiple_of"]) == 14336
    with pytest.raises(ValueError, match="tie"):
        torchtitan_peer.model_arguments(model_shape("llama-1b"))


def test_experts_and_the_dense_model_of_a_row_have_equal_flops(tmp_path: Path) -> None:
    arguments = options(tmp_path, model="qwen3-30b-a3b")
    experts, dense = (
        training.predict(parse_row(text, Row()), tmp_path, arguments)
        for text in ("8K:full:ep2", "8K:full:model.moe=null")
    )
    assert experts["flops_per_token"] == pytest.approx(dense["flops_per_token"], rel=2e-3)  # the router's
    assert experts["predicted_gib"] > dense["predicted_gib"]
    training._command(parse_row("8K:full:ep2", Row()), tmp_path, arguments)
    assert load_config(tmp_path / "recipe.yaml").parallel.ep == 2


def test_torchtitan_gets_the_experts_of_our_recipe() -> None:
    ours = model_shape("qwen3-30b-a3b")
    family, shape = torchtitan_peer.model_arguments(ours)
    assert (family, shape["hidden_dim"], shape["head_dim"], shape["moe_inter_dim"]) == ("qwen3", 6144, 128, 768)
    experts = shape["moe_args"]
    assert (experts["num_experts"], experts["top_k"], experts["num_shared_experts"]) == (128, 8, 0)
    assert "moe_args" not in torchtitan_peer.model_arguments(ours | {"moe": None})[1]
    with pytest.raises(ValueError, match="clamp"):
        torchtitan_peer.model_arguments(ours | {"moe": ours["moe"] | {"clamp": 7.0}})


def test_adapters_of_a_row_train_on_random_weights(tmp_path: Path) -> None:
    """In miniature, by the program and the recipe of the row."""
    arguments = options(tmp_path, gpus=1)
    row = parse_row("1K:moba-64-3:full:lora4:warm1:steps1:precision.compute=bf16:compile=false", Row())
    vocabulary = model_shape("tiny")["vocab_size"]
    write_corpus(tmp_path / "long", 4096, vocabulary, "long")
    write_base(tmp_path / "base", training._shape(arguments))
    command = training._command(row, tmp_path, arguments)
    assert random_base.train(command[command.index("benchmarks.random_base") + 1 :]) == 0
    losses = [record["loss"] for record in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert losses == pytest.approx([math.log(vocabulary)] * 3, rel=0.05)


def test_even_rows_send_equally_many_tokens_to_each_expert(tmp_path: Path) -> None:
    arguments = options(tmp_path, gpus=1)
    experts = "model.moe.experts=8:model.moe.active=3:model.moe.intermediate_size=16"
    row = parse_row(f"1K:full:even:warm1:steps1:compile=false:{experts}", Row())
    write_corpus(tmp_path / "long", 4096, model_shape("tiny")["vocab_size"], "long")
    command = training._command(row, tmp_path, arguments)
    assert even_experts.train(command[command.index("benchmarks.even_experts") + 1 :]) == 0
    records = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert [(record["expert_load_max"], record["expert_load_min"]) for record in records] == [(1.0, 1.0)] * 3
    assert all(record["grad_norm"] > 0 for record in records)


def test_the_plot_has_the_fastest_row_of_each_length() -> None:
    def result(seq_len: int, attention: str, rate: float, fp8: str = "off") -> dict[str, Any]:
        rates = {"tokens_per_s_per_device": {"median": rate}, "sequences": 2}
        return {"seq_len": seq_len, "attention": attention, "fp8": fp8, "system": "moba_train"} | rates

    rows = {
        "8K:full": result(8192, "full attention", 10.0),
        "8K:full:full": result(8192, "full attention", 8.0),
        "8K:full:batch8": result(8192, "full attention", 11.0) | {"sequences": 8},
        "8K:full:fp8": result(8192, "full attention", 12.0, "tensorwise"),
        "128K:moba-512-8": result(131072, "MoBA 512/8", 9.0),
        "8K:torchtitan": result(8192, "torchtitan", 9.5) | {"system": "torchtitan 0.2.2"},
        "64K:torchtitan": {"seq_len": 65536, "attention": "torchtitan", "error": "out of memory"},
    }
    lines = training_plot.series(rows)
    assert {line: [*points] for line, points in lines.items()} == {
        "MoBA 512/8": [131072],
        "full attention": [8192],
        "torchtitan": [8192],
    }
    assert lines["full attention"][8192]["row"] == "8K:full"
    later = {"8K:full": result(8192, "full attention", 9.0), "128K:moba-512-8": {"error": "out of memory"}}
    contents = [{"results": of} for of in (rows, later)]
    assert training_plot.rows_of(contents) == rows | {"8K:full": later["8K:full"]}
    lacking = {"8K:full": 2.0, "128K:full": 3.5, "8K:torchtitan": 2.0}
    rows = {name: {"step_s": {"median": step}, "seq_len": 1} for name, step in lacking.items()}
    for name, row in rows.items():
        row["system"] = "torchtitan 0.2.2" if "titan" in name else "moba_train"
    content = {"results": rows, "lacks_update": "of our short steps too much"}
    assert [*training_plot.rows_of([content])] == ["128K:full", "8K:torchtitan"]
