"""Tokens per second, MFU and memory of the real trainer on a model shape, and of torchtitan beside it, on all GPUs of
this machine.

    python -m benchmarks.training --model llama3-8b --gpus 2 --rows 8K:full 8K:torchtitan 8K:moba-512-3-last3 \\
        128K:full:full:cp2 128K:moba-512-8:full:cp2 --output benchmarks/results/training-8b-h200-x2.json

Each row is a recipe, launched by torchrun and killed after --warm and --steps steps; the numbers are read from its
metrics.jsonl, the first steps left out, which compile and allocate. Nothing is saved. Tokens are random (never zeros),
in one document that is longer than the sequences unless a row says `packed`. `to_first_step_s` are the seconds from the
launch to the end of step 1, of which step 1, which compiles, takes `first_step_s`. `host_gib` is what the machine's
programs took of its memory during the row, at most, with those of other jobs; `sm_clock_mhz`, `power_w` and
`power_capped` say whether the GPUs' power limit set the rate (`gpu_clocks.py`). Every row is saved as soon as it is
done; `--append` keeps the rows that the file has. Compiled code is reused between rows by torch's own cache. The status
is 1 where a row has failed, other than one of torchtitan's.

Rows:
"""

import argparse
import contextlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import training_rows
from benchmarks.gpu_clocks import sampled
from benchmarks.options import need_gpus
from benchmarks.random_base import write_base
from benchmarks.record import markdown, provenance, save, spread
from benchmarks.trainer_run import model_shape, planned_here, run_until, torchrun, trainer_command, write_corpus
from benchmarks.training_rows import POLICIES, Row, parse_row
from moba_train.errors import UserError
from moba_train.memory.devices import peak_tflops
from moba_train.telemetry.jsonl import read_records

_SPREAD = ("tokens_per_s_per_device", "step_s", "data_s", "mfu", "mfu_dense", "expert_load_max")
GIB = 2**30


def measure(row: Row, folder: Path, arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Train a few steps of a row; returns spreads of the steady steps' metrics, or `error` and the end of the log."""
    run_dir = folder / "run"
    run_dir.mkdir()
    metrics = run_dir / "metrics.jsonl"
    steps = row.warm + row.steps
    began = time.monotonic()
    before, host = host_bytes_in_use(), [0]
    result: dict[str, Any] = {"seq_len": row.seq_len, "attention": row.label, "fp8": row.fp8}
    result |= {key: getattr(row, key) for key in ("policy", "cp", "tp", "pp", "ep", "lora")}
    result["sequences"] = _sequences(row, arguments)

    def records() -> list[dict[str, Any]]:
        return [record for record in read_records(metrics) if "loss" in record] if metrics.exists() else []

    def enough() -> bool:
        host[0] = max(host[0], host_bytes_in_use() - before)
        return len(records()) >= steps

    with (folder / "log").open("w+") as log:
        try:
            planned = predict(row, folder, arguments)
            command = _command(row, folder, arguments)
            launched = time.time()
            with sampled(arguments.gpus, folder / "clocks") as clocks:
                run_until(enough, command, limit_s, log)
            first, *_ = records()
            result |= {"first_step_s": first["step_s"], "to_first_step_s": first["time"] - launched}
            steady = records()[row.warm : steps]
            result |= {"system": _system(row)} | planned | _summary(steady, planned)
            result |= clocks.summary(steady[0]["time"] - steady[0]["step_s"], steady[-1]["time"])
            result["host_gib"] = host[0] / GIB
        except (RuntimeError, TimeoutError, ValueError, ImportError, UserError) as error:
            log.seek(0)
            text = log.read()
            cause = [line for line in text.splitlines() if re.search(r"\b\w*(Error|Interrupt)\b:?", line)]
            result |= {"error": f"{error}" + (f": {cause[-1].strip()}" if cause else ""), "log": text[-4000:]}
    shutil.rmtree(run_dir)
    return result | {"wall_s": time.monotonic() - began}


def host_bytes_in_use() -> int:
    """Memory of this machine that programs have, page-locked memory included; what files are cached in is not."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kibibytes = {name: int(number) for name, number, *_unit in lines}
    return 1024 * (kibibytes["MemTotal:"] - kibibytes["MemAvailable:"])


def predict(row: Row, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """FLOPs of a token, and for our trainer the predicted memory: what `moba-train plan` says of the row's recipe
    on this machine's GPUs."""
    file = folder / "plan.yaml"
    trainer_command(_recipe(row, folder, arguments), file, arguments.gpus)
    stage = planned_here(file, row.overrides, arguments.gpus)
    flops = {"flops_per_token": stage.real_flops, "dense_flops_per_token": stage.dense_flops}
    return flops if row.by_torchtitan else flops | {"predicted_gib": stage.memory.total / GIB}


def _summary(steady: Sequence[dict[str, Any]], planned: dict[str, Any]) -> dict[str, Any]:
    """Spreads over the `steady` steps; torchtitan's MFU is counted here, by the same FLOPs as ours."""
    found = {key: spread([record[key] for record in steady]) for key in _SPREAD if key in steady[0]}
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    rate = found["tokens_per_s_per_device"]["median"]
    if peak is not None and "mfu" not in found:
        for key, flops in (("mfu", "flops_per_token"), ("mfu_dense", "dense_flops_per_token")):
            found[key] = {"median": rate * planned[flops] / (peak * 1e12)}
    for key in ("memory_gib", "reserved_gib", "allocator_retries"):
        if key in steady[0]:
            found[key] = max(record[key] for record in steady)
    return found | {"steps": len(steady), "last_loss": steady[-1]["loss"]}


def _command(row: Row, folder: Path, arguments: argparse.Namespace) -> list[str]:
    if not row.by_torchtitan:
        recipe = _recipe(row, folder, arguments)
        program = "benchmarks.random_base" if row.lora else "moba_train.train"
        program = "benchmarks.even_experts" if row.even else program
        return trainer_command(recipe, folder / "recipe.yaml", arguments.gpus, *row.overrides, program=program)
    if find_spec("torchtitan") is None:
        raise ImportError("torchtitan is not installed here (pip install torchtitan==0.2.2): row left out")
    settings = {
        "model": _shape(arguments),
        "corpus": str(folder / row.documents),
        "metrics": str(folder / "run" / "metrics.jsonl"),
        "steps": row.warm + row.steps + 1,
        "sequences": _sequences(row, arguments),
        "micro_batch_size": row.micro or arguments.sequences_per_gpu,
        **{key: getattr(row, key) for key in ("seq_len", "cp", "tp", "ep", "policy", "fp8", "compiled", "even")},
    }
    file = folder / "torchtitan.json"
    file.write_text(json.dumps(settings))
    return [*torchrun(arguments.gpus), "benchmarks.torchtitan_peer", str(file)]


def _shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """The section `model` of all rows."""
    return model_shape(arguments.model) | ({"layers": arguments.layers} if arguments.layers else {})


def _system(row: Row) -> str:
    return f"torchtitan {version('torchtitan')}" if row.by_torchtitan else "moba_train"


def _recipe(row: Row, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    return row.recipe(
        arguments.model,
        folder / row.documents,
        folder / "run",
        arguments.gpus,
        arguments.sequences_per_gpu,
        arguments.layers,
    )


def _sequences(row: Row, arguments: argparse.Namespace) -> int:
    return row.sequences(arguments.gpus, arguments.sequences_per_gpu)


def table(results: dict[str, dict[str, Any]]) -> str:
    """All rows as a Markdown table."""
    rows = [
        ["row", "step, s", "tokens/s/GPU", "MFU, work done", "MFU, dense formula", "peak GiB", "predicted GiB", "ratio"]
    ]
    for name, result in results.items():
        if "error" in result:
            rows.append([f"`{name}`", result["error"][:100], *[""] * 6])
            continue

        def shown(key: str, form: str, of: dict[str, Any] = result) -> str:
            value = of.get(key)
            return "" if value is None else format(value["median"] if isinstance(value, dict) else value, form)

        both = "memory_gib" in result and "predicted_gib" in result
        numbers = [
            shown(key, form)
            for key, form in (
                ("step_s", ".3f"),
                ("tokens_per_s_per_device", ",.0f"),
                ("mfu", ".1%"),
                ("mfu_dense", ".1%"),
                ("memory_gib", ".1f"),
                ("predicted_gib", ".1f"),
            )
        ]
        launches = result.get("of_launches", {"count": 1})
        if launches["count"] > 1:
            numbers[1] = "{median:,.0f} ({min:,.0f} to {max:,.0f})".format(**launches)
        ratio = f"{result['predicted_gib'] / result['memory_gib']:.2f}" if both else ""
        rows.append([f"`{name}`", *numbers, ratio])
    return markdown(rows)


def main() -> None:
    _, _, how_rows_are_written = (training_rows.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{how_rows_are_written}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", nargs="+", default=["8K:full", "8K:moba-512-3-last3"], metavar="ROW")
    for name in ("tp", "cp", "pp", "warm", "steps"):
        but = ", but not of torchtitan rows, which take 1" if name == "pp" else ""
        parser.add_argument(f"--{name}", type=int, default=getattr(Row, name), help=f"of rows that give none{but}")
    parser.add_argument("--fp8", default="off", choices=["off", "tensorwise", "rowwise"], help="of rows that give none")
    parser.add_argument(
        "--policy",
        default="none",
        choices=POLICIES,
        help="checkpointing of rows that give none; torchtitan rows have no budget and take none in its place",
    )
    parser.add_argument("--sequences-per-gpu", type=int, default=1, help="sequences per GPU and optimizer step")
    parser.add_argument("--repetitions", type=int, default=1, help="launches of each row, all rows by turns")
    parser.add_argument("--row-seconds", type=float, default=240, help="time after which a row is given up")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="time after which no row begins")
    parser.add_argument(
        "--append", action="store_true", help="keep the rows of the result file, and rates of the same ones"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    defaults = Row(**{name: getattr(arguments, name) for name in ("tp", "cp", "pp", "warm", "steps", "fp8", "policy")})
    try:
        rows = [parse_row(text, defaults) for text in arguments.rows]
    except ValueError as error:
        parser.error(f"--rows: {error}")
    need_gpus(parser, arguments.gpus)
    if arguments.append and (other := _otherwise_measured(arguments)):
        parser.error(
            f"--append: {arguments.output} has rows of {other}; allowed: rows measured alike, or another --output"
        )
    if failed := run(rows, arguments):
        raise SystemExit(f"failed: {' '.join(failed)}")


def run(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    """Measure the `rows` one by one, save each, and print the table. Returns the names of rows that failed, other than
    torchtitan's."""
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    if arguments.append:
        with contextlib.suppress(FileNotFoundError):
            results = json.loads(arguments.output.read_text())["results"]
    settings = _settings(arguments)
    failed: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        needed = max((row.warm + row.steps + 2) * _sequences(row, arguments) * row.seq_len for row in rows)
        for documents in {row.documents for row in rows}:
            write_corpus(folder / documents, 2 * needed, model_shape(arguments.model)["vocab_size"], documents)
        write_base(folder / "base", _shape(arguments))
        for _, row in product(range(arguments.repetitions), rows):
            if row.name in failed:
                continue
            left = arguments.budget_seconds - (time.monotonic() - began)
            if left <= 0:
                print(f"{row.name}: not run, the {arguments.budget_seconds:.0f} s are over", flush=True)
                continue
            result = measure(row, folder, arguments, min(left, arguments.row_seconds))
            results[row.name] = repeated(results.get(row.name, {}), result)
            if "error" in result:
                failed[row.name] = row
            print(f"{row.name}: {result.get('error', 'done')} ({result['wall_s']:.0f} s)", flush=True)
            save(arguments.output, settings, results)
    print(f"\n{table(results)}", flush=True)
    return [name for name, row in failed.items() if not row.by_torchtitan]


def repeated(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The `result` of a row's last launch that did not fail, with the `rates` of all such and their spread."""
    if "error" in result:
        return before if before and "error" not in before else result
    rates = [*before.get("rates", []), result["tokens_per_s_per_device"]["median"]]
    return result | {"rates": rates, "of_launches": spread(rates)}


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(arguments).items() if key not in ("output", "rows")}


def _otherwise_measured(arguments: argparse.Namespace) -> str:
    """In what the rows of the result file differ from those to come: a file says it once for all of its rows."""
    if not arguments.output.exists():
        return ""
    found = json.loads(arguments.output.read_text())
    limits = ("row_seconds", "budget_seconds", "append", "repetitions")
    settings = {key: value for key, value in _settings(arguments).items() if key not in limits}
    now = {key: value for key, value in provenance().items() if key in ("commit", "device", "torch")} | settings
    before = found | found["settings"]
    return ", ".join(f"{key} {before.get(key)}, not {value}" for key, value in now.items() if before.get(key) != value)


if __name__ == "__main__":
    main()
