"""What a recipe's blend comes to, stage by stage: tokens, shares and repeats of every source."""

from dataclasses import dataclass

from rich.table import Table

from moba_train.config.schema import RunConfig
from moba_train.config.stages import resolve_stages
from moba_train.data.stage_data import training_data


@dataclass(frozen=True)
class SourceUse:
    """What one source gives to one stage."""

    stage: str
    source: str
    """Corpus, with the range of document lengths where there is one."""
    tokens: int
    """Tokens of its samples, padding included."""
    share: float
    """Of the stage's tokens."""
    epochs: float
    """How often the stage reads the source, up to the end of the documents shuffled together."""
    epochs_so_far: float
    """How often the run has read it by the end of the stage."""
    padding: float
    """Share of its samples that is no document's."""


def preview(config: RunConfig) -> list[SourceUse]:
    """What each source gives to each stage, as training will read them. Raises DataError as `StageData` does."""
    starts: dict[str, int] = {}
    uses = []
    for stage in resolve_stages(config):
        sequences = stage.max_steps * stage.batch_sequences
        data = training_data(config, stage, starts)
        after = data.starts_after(sequences)
        for index, (stratum, stream) in enumerate(zip(data.strata, data.streams, strict=True)):
            samples = int(data.samples_of[index])
            position = after[stratum.name]
            uses.append(
                SourceUse(
                    stage.name,
                    stratum.name,
                    samples * stage.seq_len,
                    samples / sequences,
                    (position - starts.get(stratum.name, 0)) / stream.tokens,
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
