"""What determines a corpus of long documents besides its sources."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusOptions:
    """The names are those of the settings in the manifest."""

    vocab_size: int = 16384
    holdout: float = 0.02
    """Share of the text of each source that goes to validation, in whole folders; at most."""
    min_tokens: int = 32768
    """Length of the shortest document of real text."""
    max_tokens: int = 524288
    """Length of the longest one."""
    recall_share: float = 0.05
    """Share of synthetic recall documents in the training tokens."""
    seed: int = 0

    def recall_documents(self, tokens: float, least: int) -> dict[int, int]:
        """Recall documents by length in tokens: `tokens` in equal shares of three lengths, `least` of each at least."""
        lengths = (max(self.min_tokens // 4, 1), self.min_tokens, 4 * self.min_tokens)
        return {length: max(round(tokens / len(lengths) / length), least) for length in lengths}
