"""A row of `benchmarks.training` for programs that look into the trainer and so train in their own process, started by
torchrun."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.options import need_gpus
from benchmarks.trainer_run import model_shape, write_corpus
from benchmarks.training_rows import Row, parse_row


def parse(description: str | None, defaults: Row) -> tuple[Row, argparse.Namespace]:
    """The row and the options of the command line; `defaults`: what `--row` leaves out. Ends the program without a
    GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--row", default="8K:full", help="as in benchmarks.training")
    parser.add_argument("--sequences-per-gpu", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus(parser)
    return parse_row(arguments.row, defaults), arguments


@dataclass(frozen=True)
class OwnRank:
    """This process, a rank that trains a row."""

    rank: int
    world: int
    folder: Path
    """Temporary folder that all ranks share: a folder for each, named by its rank, and `run`, the run's own."""
    recipe: Path
    """The recipe's file; the row's overrides come on top."""

    @property
    def own(self) -> Path:
        """This rank's folder."""
        return self.folder / str(self.rank)


@contextmanager
def own_rank(row: Row, arguments: argparse.Namespace) -> Iterator[OwnRank]:
    """A corpus and the recipe of `row` in a temporary folder, which rank 0 removes at the end."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # Every rank has the same corpus in a folder of its own; rank 0's run folder holds for all. The name has the process
    # that all ranks have in common, torchrun's, so that one that was killed is not in the way of the next.
    folder = Path(tempfile.gettempdir()) / f"own-rank-{os.getppid() if world > 1 else os.getpid()}"
    own = folder / str(rank)
    own.mkdir(parents=True)
    try:
        tokens = 2 * (row.warm + row.steps + 2) * row.sequences(world, arguments.sequences_per_gpu) * row.seq_len
        write_corpus(own / "corpus", tokens, model_shape(arguments.model)["vocab_size"], row.documents)
        sizes = (arguments.sequences_per_gpu, arguments.layers)
        recipe = row.recipe(arguments.model, own / "corpus", folder / "run", world, *sizes)
        (own / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        yield OwnRank(rank, world, folder, own / "recipe.yaml")
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
