"""Work of MoBA by FlexAttention: the pairs of queries and keys that its tiles multiply, beside those that queries need.

    python -m benchmarks.flex_tiles --output benchmarks/results/flex-tiles-cpu.json
    python -m benchmarks.flex_tiles --model FOLDER --text FILE --output RESULT.json --save LAYER:Q_K_V.safetensors
    python -m benchmarks.pictures flex-tiles

On a CPU: a tile is needed or not, whatever the GPU. Rows are those of `benchmarks.attention`, of random queries and
keys; with a model in Hugging Face's format in addition rows of its own, layer by layer, at the first tokens of a text.
`--save` keeps q, k and v of one layer for the option `inputs` of rows.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.attention import case_argument
from benchmarks.attention_cost import history_blocks
from benchmarks.attention_rows import Case, Row
from benchmarks.flex_moba import fits, sees_blocks, tiles
from benchmarks.plotting import FULL, INK, MOBA
from benchmarks.record import markdown, save
from moba_train.attention.engine import OperatorEngine
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.protocol import LocalAttention
from moba_train.errors import CheckpointError
from moba_train.tools.evaluate import load_on_this_machine
from moba_train.tools.evaluated_recipe import open_to_generate
from moba_train.tools.text_tokenizer import load_text_tokenizer

HEADS = ",heads=4,kv=1"
"""A quarter of the heads that other rows have: random heads differ by chance alone."""
ROWS = [f"{row}{HEADS}" for row in ("8K:512/3", "32K:512/3", "32K:512/8", "32K:128/8", "128K:512/8", "128K:4096/12")]
TRAINED = ["8K:512/3", "8K:512/8", "8K:128/8"]
"""Settings of a model's rows."""

Inputs = tuple[Tensor, Tensor, Tensor]


class _Recorder(OperatorEngine):
    """Runs a layer's attention and keeps what it was given."""

    qkv: Inputs

    def __call__(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.qkv = q_LHD, k_LKD, v_LKD
        return super().__call__(q_LHD, k_LKD, v_LKD, attention, layout, *sink)


@torch.no_grad()
def model_inputs(folder: Path, text: Path, tokens: int) -> list[Inputs]:
    """q [T, H, D], k and v [T, K, D] of every layer, in bf16, at the first tokens of a text."""
    saved, roots = open_to_generate(folder, None, ())
    model = load_on_this_machine(saved)
    ids = load_text_tokenizer(folder / "tokenizer.json", roots).encode(text.read_text())[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"--text {text}: {len(ids)} tokens given, {tokens} needed")
    engines = [_Recorder() for _ in model.blocks]
    model.set_engines(engines)
    last = torch.tensor([tokens - 1])
    model(torch.tensor(ids), torch.arange(tokens), packed_layout([tokens]), rows_n=last)
    return [(q.bfloat16(), k.bfloat16(), v.bfloat16()) for q, k, v in (engine.qkv for engine in engines)]


def shares(row: Row) -> dict[str, float]:
    """Pairs of causal attention that queries need, and those that tiles of 128 by 128 multiply."""
    case = row.case
    computed = tiles(sees_blocks(row.selected(), case.block_size), case.block_size).pairs_computed() / case.heads
    causal = case.tokens * (case.tokens + 1) / 2
    whole = history_blocks(case.tokens, case.block_size, case.topk) * case.block_size
    needed = whole + case.tokens * (case.block_size + 1) / 2
    return {"needed": needed / causal, "computed": computed / causal, "times": computed / needed}


def of_model(layers: Sequence[Inputs], settings: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each setting: the mean of all layers, and the least and the most of them."""
    rows = []
    for text in settings:
        (q, k, _), *_ = layers
        case = case_argument(f"{text},heads={q.shape[1]},kv={k.shape[1]},d={q.shape[2]}")
        row = Row(case, "cpu", "reference")
        found = []
        for row.q, row.k, _ in layers:
            found.append(shares(row))
        times = [one["times"] for one in found]
        means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
        rows.append({"row": case.name, "data": "trained", **means, "least": min(times), "most": max(times)})
    return rows


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each row, in parts of causal attention's pairs."""
    lines = [["row", "queries and keys", "needed", "in tiles of 128", "times as many"]]
    for row in results:
        spread = f" ({row['least']:.1f} to {row['most']:.1f} by layer)" if "least" in row else ""
        case = Case.parse(row["row"])
        name = Case(case.tokens, case.block_size, case.topk).name
        numbers = (f"{100 * row[key]:.1f} %" for key in ("needed", "computed"))
        lines.append([f"`{name}`", row["data"], *numbers, f"{row['times']:.1f}{spread}"])
    return markdown(lines)


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Two bars for each row: what queries need of full attention, and what FlexAttention multiplies."""
    results = content["results"]
    axes = figure.subplots()
    names = [f"{table([row]).splitlines()[2].split('`')[1]}, {row['data']}" for row in results]
    for offset, key, colour, label in (
        (-0.2, "needed", MOBA, "needed by the queries"),
        (0.2, "computed", FULL, "in tiles that FlexAttention cannot skip"),
    ):
        places = [place + offset for place in range(len(results))]
        values = [100 * row[key] for row in results]
        axes.barh(places, values, 0.38, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.0f}", (value, place), (3, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(results)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 118)
    axes.set_xlabel("pairs of a query and a key, % of full causal attention")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.14), ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=case_argument, default=[Case.parse(row) for row in ROWS])
    parser.add_argument("--model", type=Path, help="folder of a model in Hugging Face's format")
    parser.add_argument("--text", type=Path, help="text that the model reads")
    parser.add_argument("--save", metavar="LAYER:FILE", help="keep q, k and v of this layer, counted from 0")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if (given.model is None) != (given.text is None):
        parser.error("--model and --text need each other")
    if other := [case.name for case in given.rows if not fits(case)]:
        parser.error(f"--rows: given {', '.join(other)}; allowed: one document of whole blocks, each of whole tiles")
    layer, _, file = (given.save or "").partition(":")
    if given.save and (given.model is None or not layer.isdecimal() or not file):
        parser.error(f"--save: given {given.save}; allowed: LAYER:FILE, with --model")
    results: list[dict[str, Any]] = []
    layers: list[Inputs] = []
    try:
        if given.model is not None:
            layers = model_inputs(given.model, given.text, max(case_argument(text).tokens for text in TRAINED))
        if given.save and int(layer) >= len(layers):
            parser.error(f"--save: layer {layer} given; allowed: 0 to {len(layers) - 1}")
        for case in given.rows:
            data = "trained" if case.inputs else case.routing
            results.append({"row": case.name, "data": data, **shares(Row(case, "cpu", "reference"))})
            print(table(results[-1:]).splitlines()[-1], flush=True)
    except (ValueError, OSError, CheckpointError) as error:
        parser.error(str(error))
    if given.save:
        save_file({name: x.contiguous() for name, x in zip("qkv", layers[int(layer)], strict=True)}, file)
    if layers:
        results += of_model(layers, TRAINED)
    settings = {"model": given.model and given.model.name, "text": given.text and given.text.name}
    save(given.output, settings, results)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
