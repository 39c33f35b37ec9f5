"""The documents that a stage's sequences are packed from: attention costs what their lengths make it cost."""

from dataclasses import dataclass

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.data.stage_data import training_data

READ_TOKENS = 1 << 26
"""Tokens of a stage whose document lengths are read. 64M tokens in documents of 500 tokens on average took 0.7 s on one
CPU core."""
READ_SEQUENCES = 1 << 13
"""And its sequences: short ones take as long each, and a run begins when rank 0 has printed its plan."""


@dataclass(frozen=True)
class Documents:
    """Lengths of the documents in some sequences of a stage, in tokens."""

    lengths: tuple[int, ...]
    """Document parts in the order of the sequences, padding included as a document of its own, as it is computed."""
    from_corpora: bool
    """False: the corpora were not found, and each sequence counts as one document."""
    repeats: tuple[str, ...] = ()
    """A sentence for each corpus that is smaller than a batch (`StageData.repeats`)."""

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(self.lengths)

    @property
    def source(self) -> str:
        """Origin of the lengths, as a phrase to print."""
        return "documents of the corpora" if self.from_corpora else "one document per sequence: corpora not found"


def stage_documents(config: RunConfig, stage: Stage) -> Documents:
    """Documents of the first sequences of `stage`, at most `READ_TOKENS` tokens or `READ_SEQUENCES`, at least one.

    The sequences are those that training makes of the stage's corpora, blended and packed alike, when the stage begins
    at the start of their document order. A later stage goes on where the one before stopped; as the order is random,
    its documents are as long on average. Tokens are not read, only lengths. If a file of a corpus is missing (from the
    working directory), one sequence that is a single document. Raises DataError for a corpus that is damaged, empty, or
    made for a larger vocabulary.
    """
    files = [corpus_file(source.path, end) for source in stage.sources for end in ("bin", "idx")]
    if not all(file.is_file() for file in files):
        return Documents((stage.seq_len,), from_corpora=False)
    sequences = min(stage.steps * stage.batch_sequences, max(1, READ_TOKENS // stage.seq_len), READ_SEQUENCES)
    data = training_data(config, stage, starts={})
    return Documents(
        tuple(length for index in range(sequences) for length in data.lengths(index)),
        from_corpora=True,
        repeats=tuple(data.repeats(stage.batch_tokens)),
    )
