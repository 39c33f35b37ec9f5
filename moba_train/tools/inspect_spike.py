"""Shows the dump of a spike: its numbers as tables, and the documents of its batch as text, highest loss first."""

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moba_train.config.load import load_config
from moba_train.data.indexed import IndexedDataset
from moba_train.data.stream import DocumentPart
from moba_train.errors import DataError, UserError
from moba_train.health.dump import dump_folder
from moba_train.strict_json import from_json
from moba_train.tools.text_tokenizer import load_text_tokenizer

SHOWN_CHARACTERS = 400


class PartLoss(NamedTuple):
    """Loss of a document part of the batch, over all ranks that held tokens of it."""

    part: DocumentPart
    loss: float
    """Mean over its loss tokens; 0 where it has none."""
    loss_tokens: float


def print_spike(run_dir: Path, step: int | None, documents: int, console: Console) -> None:
    """Print the dump of `step`, by default the newest one, with the beginnings of its `documents` of highest loss.

    Documents are printed as text where the run has a tokenizer, else as token ids. Raises UserError when there is no
    such dump, or when this version cannot read it.
    """
    path, others = _find_dump(run_dir, step)
    try:
        dump = from_json(path.read_text(encoding="utf-8"))
        head = f"step {dump['step']}, stage {dump['stage']}, {dump['tokens']} tokens: {dump['level']}"
        what = f"{dump['message']}; action: {dump['action']}"
        tables = [_step_table(dump), _layer_table(dump), _rank_table(dump)]
        found = _part_losses(dump)
    except KeyError as error:
        raise UserError(f"{path} lacks {error}: it was not written by this version of moba_train") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no dump of a spike: {error}") from error
    say = partial(console.print, soft_wrap=True, highlight=False)
    say(head, style="bold")
    say(what)
    if others:
        say(f"other dumps of this run: {', '.join(map(str, others))}")
    say()
    for table in tables:
        console.print(table)
    say(f"{len(found)} document parts, highest loss first:")
    decode = _decoder(run_dir)
    for part, loss, loss_tokens in found[:documents]:
        say(
            f"\nloss {loss:.4f} over {loss_tokens:g} tokens  {part.source} document {part.document} "
            f"tokens {part.start}:{part.stop}",
            style="bold",
        )
        say(Text(decode(part)))
    if len(found) > documents:
        say(f"\n{len(found) - documents} more: --documents {len(found)}")


def _find_dump(run_dir: Path, step: int | None) -> tuple[Path, list[int]]:
    """The dump of `step` or the newest, and the steps of the other ones."""
    folder = dump_folder(run_dir)
    found = ((path.stem.removeprefix("step_"), path) for path in sorted(folder.glob("step_*.json")))
    dumps = {int(number): path for number, path in found if number.isdecimal()}
    if not dumps:
        raise UserError(f"{folder} holds no dumps: RUN must be the run_dir of a run that had a spike")
    chosen = max(dumps) if step is None else step
    if chosen not in dumps:
        raise UserError(f"--step: {chosen} given; {run_dir} has dumps of steps {', '.join(map(str, dumps))}")
    return dumps.pop(chosen), list(dumps)


def _step_table(dump: dict[str, Any]) -> Table:
    numbers = ("loss", "spike_z_loss", "grad_norm", "spike_z_grad", "lr")
    return _table(numbers, [[dump[name] for name in numbers]])


def _rank_table(dump: dict[str, Any]) -> Table:
    columns = ("loss", "repeated_loss", "loss_tokens")
    rows = [(number, *(rank[name] for name in columns)) for number, rank in enumerate(dump["ranks"])]
    return _table(("rank", *columns), rows)


def _layer_table(dump: dict[str, Any]) -> Table:
    """Numbers of each layer: gradient norm, and the statistics of its attention over all ranks."""
    norms = dump["gradient_norms"]
    layers = dump["attention"]
    names = list(dict.fromkeys(name for layer in layers for name in layer))
    rows = [
        [layer["layer"], layer["kind"], layer["norm"], *(found.get(name, "") for name in names)]
        for layer, found in zip(norms["layers"], layers, strict=True)
    ]
    rest = [""] * len(names)
    rows += [[f"all {kind}", "", norm, *rest] for kind, norm in norms["kinds"].items()]
    rows += [[name, "", norm, *rest] for name, norm in norms.items() if name not in ("layers", "kinds")]
    return _table(("layer", "kind", "gradient norm", *(name.replace("_", " ") for name in names)), rows)


def _part_losses(dump: dict[str, Any]) -> list[PartLoss]:
    """The document parts of the batch in order of descending loss; losses that are not finite come first."""
    sums: dict[DocumentPart, tuple[float, float]] = {}
    micro_batches = chain.from_iterable(rank["micro_batches"] for rank in dump["ranks"])
    for entry in chain.from_iterable(micro_batches):
        part = DocumentPart(*(entry[name] for name in DocumentPart._fields))
        total, tokens = sums.get(part, (0.0, 0.0))
        loss = entry["loss"] * entry["loss_tokens"] if entry["loss_tokens"] else 0.0
        sums[part] = total + loss, tokens + entry["loss_tokens"]
    found = [PartLoss(part, total / tokens if tokens else 0.0, tokens) for part, (total, tokens) in sums.items()]
    return sorted(found, key=lambda entry: (math.isfinite(entry.loss), -entry.loss))


def _decoder(run_dir: Path) -> Callable[[DocumentPart], str]:
    """A function that decodes the beginning of a document part."""
    path = load_config(run_dir / "config.yaml").data.tokenizer
    tokenizer = load_text_tokenizer(path) if path else None

    def decode(part: DocumentPart) -> str:
        try:
            ids = IndexedDataset(part.source).document(part.document, part.start, part.stop)[:SHOWN_CHARACTERS].tolist()
        except DataError as error:
            return f"({error})"
        text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."

    return decode


def _table(columns: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return table
