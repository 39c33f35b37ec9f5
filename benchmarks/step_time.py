"""Predicted beside measured time of training steps: the model behind `moba-train plan`, on the measured GPUs.

    python -m benchmarks.step_time                            # the table
    python -m benchmarks.step_time --fit                      # an H200's fitted rates, again
    python -m benchmarks.step_time --write benchmarks/measured/planning.md   # both tables, into the document
    python -m benchmarks.step_time --rates FILE.json          # by the rates that `moba-train calibrate` measured
    python -m benchmarks.step_time --results FILE.json        # every row of a result of benchmarks.training

Measured are the median steps of result files that were made for other purposes; where a file says that they leave out
the optimizer's update (`lacks_update`), it is added as plan predicts it. Six of an H200's rates
(tools/plan/h200.json) are fitted to the rows marked so; every other row is predicted, each by the rates of its own
GPU. In the fit, rows of another GPU count by the H200's rates, scaled by the data sheets (`scaled`). Compared are STEPS
and each row of the files `WHOLE_FILES` (measured_steps.py); rows that are left out have a reason. No GPU is needed.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured_steps import (
    EAGER_LOSS,
    FIRST_DAY_OF_FEWER_COPIES,
    FLASH2,
    LAST_DAY_OF_TWO,
    LEFT_OUT,
    LOGITS_ONCE,
    STEPS,
    WHOLE_FILES,
    Measured,
)
from benchmarks.record import insert_tables, markdown
from benchmarks.trainer_run import write_corpus
from benchmarks.training_rows import Row, parse_row
from moba_train.config.load import load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.memory.devices import H200, Device, Gpu, known_gpu
from moba_train.memory.flops import stage_documents
from moba_train.parallel.links import LINKS
from moba_train.resolve.run import resolve_unchecked, stage_layout
from moba_train.tools.plan.rates import Rates, read_rates, scaled, shipped_rates
from moba_train.tools.plan.step_time import NORM_BYTES, Machine, StageStep, attention_times, predict_step

RESULTS = Path(__file__).parent / "results"
COMPARED = "benchmarks/measured/planning.md"
"""The document with the tables."""
FITTED = ("products", "compiled_passes", "eager_passes", "attention_in_step")
"""Rates that are fitted to steps in bf16."""
FITTED_FLOAT8 = ("float8_products", "float8_weight_bytes")
"""Rates that are fitted to steps in FP8."""
MISSING_SHARE = 0.8
"""Share of the optimizer's predicted time that the steps of a file with `lacks_update` leave out; the host launches the
update in the rest. By the 8B model at 8K on two H200, measured without and with it: 28 to 38 ms of 45."""


@dataclass(frozen=True)
class Compared:
    """A measured step beside the predicted one."""

    measured: Measured
    seconds: float
    predicted: StageStep

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted.time.seconds / self.seconds - 1


RatesOf = Callable[[Gpu], Rates]


def compare(rates_of: RatesOf = shipped_rates, steps: Sequence[Measured] | None = None) -> list[Compared]:
    """Measured steps beside those that the rates of their GPUs predict; None: all steps."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = all_steps() if steps is None else steps
        predicted = [_predict(step, rates_of, Path(folder)) for step in chosen]
    return [_compared(step, found, rates_of(measured_gpu(step))) for step, found in zip(chosen, predicted, strict=True)]


def _compared(step: Measured, predicted: StageStep, rates: Rates) -> Compared:
    content = _content(RESULTS / step.file)
    missing = predicted.time.optimizer if "lacks_update" in content else 0.0
    more = _copied_more(predicted, rates) if content["date"] < FIRST_DAY_OF_FEWER_COPIES else 0.0
    return Compared(step, measured_seconds(step) + MISSING_SHARE * missing - more, predicted)


def _copied_more(predicted: StageStep, rates: Rates) -> float:
    """Seconds of copies of what no other rank had a part of: at each gather out of its buffer (4 bytes an element), and
    of gradients that were added up, which now begin with the first (4 less for further micro-batches)."""
    mesh, stage = predicted.mesh, predicted.stage
    if mesh.ranks > mesh.tp:
        return 0.0
    elements = predicted.time.optimizer / (rates.update_s["adamw"] + NORM_BYTES / rates.memory)
    passes = stage.batch_sequences // stage.micro_batch_size
    stay = sum(layer.weights for layer in predicted.activations.layers) / len(predicted.activations.layers)
    return 4 * elements * (passes * (1 - stay) + 1) / rates.memory


def all_steps() -> list[Measured]:
    """STEPS, and what the whole files have besides."""
    listed = {(step.file, step.keys) for step in STEPS}
    rows = [row for files in WHOLE_FILES for file in sorted(RESULTS.glob(files)) for row in rows_of(file)]
    rows = [row for row in rows if not {(row.file, ""), (row.file, row.keys[0])} & LEFT_OUT.keys()]
    return [*STEPS, *(row for row in rows if (row.file, row.keys) not in listed)]


def rows_of(file: Path) -> list[Measured]:
    """The rows of a result of `benchmarks.training` that our trainer ran to the end."""
    found = _content(file)
    settings = found["settings"]
    return [
        Measured(
            file.name if file.parent == RESULTS else str(file.absolute()),
            (name,),
            name,
            settings["model"],
            settings["gpus"],
            settings["sequences_per_gpu"],
            settings["layers"],
            defaults=Row(**{name: settings[name] for name in ("policy", "tp", "cp", "pp", "fp8")}),
        )
        for name, row in found["results"].items()
        if "step_s" in row and row["system"] == "moba_train"
    ]


def measured_seconds(step: Measured) -> float:
    """The median step of the file."""
    found = _content(RESULTS / step.file)["results"]
    for key in step.keys:
        found = found[key]
    if "step_s" in found:
        return float(found["step_s"]["median"])
    row = parse_row(step.row, step.defaults)
    tokens = row.sequences(step.gpus, step.per_gpu) * row.seq_len
    return tokens / step.gpus / float(found["tokens_per_s"]["median"])


def measured_gpu(step: Measured) -> Gpu:
    """The GPU that the file names. Raises ValueError for one whose rates nothing is known of."""
    device = _content(RESULTS / step.file)["device"]
    if (gpu := known_gpu(device)) is None:
        raise ValueError(f"{step.file}: measured on {device!r}, which moba_train/memory/devices.py does not know")
    return gpu


def _content(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _predict(step: Measured, rates_of: RatesOf, folder: Path) -> StageStep:
    row = parse_row(step.row, step.defaults)
    corpus = folder / row.documents
    if row.documents == "packed" and not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, 1 << 21, 1 << 15)
    content = row.recipe(step.model, corpus, folder, step.gpus, step.per_gpu, step.layers)
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(content))
    config = load_config(file, row.overrides)
    run = resolve_unchecked(config)
    (stage,) = run.stages
    sizes = mesh_sizes(stage.parallel, step.gpus)
    on_gpu = rates_of(measured_gpu(step))
    if _computed_logits_twice(step):
        # The second product as the bytes that would take as long.
        again = 2 * config.model.hidden_size * on_gpu.memory / on_gpu.products
        passed = logit_bytes(rates_of(H200), twice=True)
        on_gpu = _with(on_gpu, {name: number + again for name, number in passed.items()})
    if step.file in EAGER_LOSS:
        on_gpu = _with(on_gpu, {"compiled_loss_bytes": on_gpu.eager_loss_bytes})
    machine = Machine(measured_gpu(step), step.gpus, LINKS, on_gpu)
    attention = attention_times(config.model, stage, stage_documents(run.samples, stage), machine)
    device = Device(machine.gpu, host_memory=None, is_here=False)
    layout = stage_layout(run.setup, run.memory, stage, sizes, step.gpus, device)
    return predict_step(run.setup, run.memory.optimizer, stage, layout, attention, machine)


def _computed_logits_twice(step: Measured) -> bool:
    date: str = _content(RESULTS / step.file)["date"]
    return date <= LAST_DAY_OF_TWO and step.file not in LOGITS_ONCE


def fit() -> Rates:
    """An H200's rates that come nearest to the rows marked `fit`."""
    rates = shipped_rates(H200)
    for _ in range(6):
        rates = fitted_once(rates)
    return rates


def fitted_once(rates: Rates) -> Rates:
    """One Gauss-Newton step of least squares of relative errors: `FITTED` by the rows in bf16, `FITTED_FLOAT8` by
    those in FP8. The bytes of a logit follow from the measured loss and the products."""
    return _nearer(_nearer(rates, FITTED, in_float8=False), FITTED_FLOAT8, in_float8=True)


def _nearer(rates: Rates, names: Sequence[str], in_float8: bool) -> Rates:
    rates = _changed(rates)  # else the slopes would hold what the file rounds of a logit's bytes
    errors = _fitted_errors(rates, in_float8)
    step = 1e-3
    changed = [_changed(rates, **{name: getattr(rates, name) * (1 + step)}) for name in names]
    slopes = np.stack([(_fitted_errors(one, in_float8) - errors) / step for one in changed], axis=1)
    moves, *_ = np.linalg.lstsq(slopes, -errors, rcond=None)
    found = {name: getattr(rates, name) * (1 + float(move)) for name, move in zip(names, moves, strict=True)}
    return _changed(rates, **found)


def _changed(rates: Rates, **values: float) -> Rates:
    rates = _with(rates, values)
    return _with(rates, logit_bytes(rates))


def _with(rates: Rates, values: Mapping[str, Any]) -> Rates:
    return rates.model_copy(update=dict(values))


def _fitted_errors(rates: Rates, in_float8: bool) -> np.ndarray:
    steps = [step for step in STEPS if step.fit and ("fp8" in step.row) == in_float8]
    return np.array([row.error for row in compare(partial(scaled, rates), steps)])


LOSSES = {"eager_loss_bytes": "ours", "compiled_loss_bytes": "ours, compiled chunk"}
"""Rows of a result of `loss_compare`, by the rate that follows from them."""


def logit_bytes(rates: Rates, twice: bool = False) -> dict[str, float]:
    """Bytes for each logit that the losses of a result of `loss_compare` take besides their matrix products: the median
    rows'. twice: of the loss that computed its logits twice."""
    measured = _content(RESULTS / f"loss-compare-h200{'' if twice else '-logits-once'}.json")
    products = 4 if twice else 3
    hidden, vocabulary = (measured["settings"][key] for key in ("hidden_size", "vocab_size"))

    def besides_products(tokens: str, row: dict[str, Any]) -> float:
        seconds = row["both_ms"]["median"] / 1e3
        return rates.memory * (seconds / (int(tokens) * vocabulary) - 2 * products * hidden / rates.products)

    return {
        name: statistics.median(besides_products(*row) for row in measured["results"][loss].items())
        for name, loss in LOSSES.items()
    }


def table(rows: Sequence[Compared]) -> str:
    """All rows as a Markdown table."""
    lines = [["model", "row", "GPUs", "measured, s", "predicted, s", "error", "", "file"]]
    for row in rows:
        measured = row.measured
        model = measured.model + (f", {measured.layers} layers" if measured.layers else "")
        lines.append(
            [
                model,
                f"`{measured.row}`",
                f"{measured.gpus} {measured_gpu(measured).name}",
                f"{row.seconds:.3f}",
                f"{row.predicted.time.seconds:.3f}",
                f"{row.error:+.1%}",
                "fitted" if measured.fit else "",
                f"`{Path(measured.file).name}`",
            ]
        )
    return markdown(lines)


def summary(rows: Sequence[Compared]) -> str:
    """Errors by kind of step, as a Markdown table."""
    by_kind: dict[str, list[float]] = {}
    for compared in rows:
        by_kind.setdefault(_kind(compared.measured), []).append(compared.error)
    lines = [["steps", "rows", "median error", "largest"]]
    for kind, errors in [*sorted(by_kind.items()), ("all", [row.error for row in rows])]:
        largest = max(errors, key=abs)
        lines.append([kind, str(len(errors)), f"{statistics.median(errors):+.1%}", f"{largest:+.1%}"])
    return markdown(lines)


def calibrated(rates: Rates) -> str:
    """Both tables of the steps on the GPU of `rates`, predicted by its rates and, for the rest, shipped ones.

    Without a measured rate, steps in FP8, and full attention by another backend than `auto`, are not compared.
    """
    gpu = rates.device
    in_float8 = rates.float8_products is not None
    steps = [step for step in all_steps() if measured_gpu(step) == gpu and FLASH2 not in step.row]
    steps = [step for step in steps if in_float8 or parse_row(step.row, step.defaults).fp8 == "off"]
    complete = rates.model_copy(update={"node_bandwidth": rates.node_bandwidth or shipped_rates(gpu).node_bandwidth})
    rows = compare(lambda other: complete if other == gpu else shipped_rates(other), steps)
    return f"{summary(rows)}\n\n{table(rows)}"


def _kind(measured: Measured) -> str:
    """Where a step belongs in `summary`."""
    row = parse_row(measured.row, measured.defaults)
    if row.tp > 1 or row.pp > 1:
        return "tensor and pipeline parallelism"
    if row.fp8 != "off":
        return "FP8"
    return "more than 8K tokens" if row.seq_len > 8192 else "8K tokens"


def left_out() -> str:
    """The files that are not compared, as a Markdown table."""
    rows = [[f"`{file}`" + (f", `{row}`" if row else ""), why] for (file, row), why in LEFT_OUT.items()]
    return markdown([["steps left out", "why"], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the rates anew, print them, and predict by them")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="predict the steps of this file's GPU alone, by it")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="of benchmarks.training, in place of all")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the tables between its markers")
    arguments = parser.parse_args()
    rates_of: RatesOf = shipped_rates
    if arguments.fit:
        rates = fit()
        rates_of = partial(scaled, rates)
        for name in (*FITTED, *FITTED_FLOAT8, *LOSSES):
            print(f"{name} = {getattr(rates, name):.4g}")
    if arguments.rates:
        print(calibrated(read_rates(arguments.rates)))
        return
    if arguments.results:
        print(table(compare(rates_of, [row for file in arguments.results for row in rows_of(file)])))
        return
    rows = compare(rates_of)
    tables = {
        "<!-- steps by kind -->": summary(rows),
        "<!-- steps -->": table(rows),
        "<!-- steps left out -->": left_out(),
    }
    if arguments.write:
        arguments.write.write_text(insert_tables(arguments.write.read_text(), tables))
    print("\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
