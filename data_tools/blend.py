"""Preview of a recipe's blend, stage by stage: tokens, share and repeats of every source."""

from dataclasses import dataclass

from rich.table import Table

from moba_train.data.loader import training_data
from moba_train.resolve.run import ResolvedRun


@dataclass(frozen=True)
class SourceUse:
    """Use of one source in one stage."""

    stage: str
    source: str
    """Corpus, followed by the range of document lengths if there is one."""
    tokens: int
    """Tokens of its samples, padding included."""
    share: float
    """Fraction of the stage's tokens."""
    epochs: float
    """Times the stage reads the source, up to the end of the last group of samples that is shuffled together."""
    epochs_so_far: float
    """Times the run has read the source by the end of the stage."""
    padding: float
    """Fraction of padding in its samples."""


def preview(run: ResolvedRun) -> list[SourceUse]:
    """The use of each source in each stage, exactly as training will read it. Raises DataError as `StageData` does."""
    starts: dict[str, int] = {}
    uses = []
    for stage in run.stages:
        sequences = stage.max_steps * stage.batch_sequences
        data = training_data(run.samples, stage, starts)
        after = data.starts_after(sequences)
        for index, (bucket, stream) in enumerate(zip(data.buckets, data.streams, strict=True)):
            samples = int(data.samples_per_bucket[index])
            name = data.stream_names[index]
            position = after[name]
            uses.append(
                SourceUse(
                    stage.name,
                    bucket.name,
                    samples * stage.seq_len,
                    samples / sequences,
                    (position - starts.get(name, 0)) / stream.tokens,
                    position / stream.tokens,
                    data.padding_fraction(index),
                )
            )
        starts = after
    return uses


def blend_table(uses: list[SourceUse]) -> Table:
    """One row per stage and source."""
    table = Table(title="what each stage reads")
    table.add_column("stage")
    table.add_column("source", overflow="fold")
    for column in ("tokens", "share", "epochs", "epochs so far", "padding"):
        table.add_column(column, justify="right")
    for use in uses:
        table.add_row(
            use.stage,
            use.source,
            f"{use.tokens:,}",
            f"{use.share:.2%}",
            f"{use.epochs:.2f}",
            f"{use.epochs_so_far:.2f}",
            f"{use.padding:.2%}",
        )
    return table
