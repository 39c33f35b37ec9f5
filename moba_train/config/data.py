"""Sources of the tokens."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moba_train.config.base import LARGEST_COUNT, Length, Section

LongConversations = Literal["split", "truncate", "drop", "error"]


class UpsampleConfig(Section):
    """Long documents more often than the others. In the list, lengths ascend; a single section is a list of one."""

    min_length: Length = Field(description="minimum tokens of a document that counts as long")
    factor: float = Field(
        gt=0, le=1_000_000, description="number of times that it is read for each time of one that is not long"
    )


class SourceConfig(Section):
    """One corpus in Megatron's indexed format: `path` names the pair `path.bin` and `path.idx`.

    A corpus may be named several times with ranges of lengths that do not overlap, each with its weight.
    """

    path: str = Field(min_length=1, description="corpus prefix: the file names without .bin/.idx")
    weight: float = Field(
        1.0, gt=0, le=LARGEST_COUNT, description="share of the training tokens, relative to the other sources"
    )
    min_length: Length | None = Field(None, description="only documents of at least this many tokens")
    below_length: Length | None = Field(None, description="only documents of fewer tokens than this")
    upsample: Annotated[
        list[UpsampleConfig] | None, BeforeValidator(lambda given: given if isinstance(given, list | None) else [given])
    ] = Field(None, description="ranges of long documents that are read more often; the source's weight stays the same")

    @property
    def length_bins(self) -> list[tuple[int, int | None, float]]:
        """First length, the length that it ends before, and factor of each range of lengths."""
        steps = self.upsample or []
        begins = [self.min_length or 0, *(step.min_length for step in steps)]
        factors = [1.0, *(step.factor for step in steps)]
        return [*zip(begins, [*begins[1:], self.below_length], factors, strict=True)]


class DataConfig(Section):
    """Training and validation corpora, and the tokenizer that made them."""

    tokenizer: str | None = Field(
        None, description="sentencepiece model, or tokenizer.json or its folder; needed by generate, checked at start"
    )
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: every seq_len tokens are a sample; best_fit: whole documents, cut only if longer than "
        "seq_len, the rest padded. Evaluation always concatenates",
    )
    long_conversations: LongConversations = Field(
        "error",
        description="conversations (documents of a corpus with a loss mask) of more than seq_len tokens. split: later "
        "parts train without what comes before; truncate: seq_len tokens of each; drop: none; error: refused at start",
    )
    train: list[SourceConfig] = Field(min_length=1, description="blend of corpora; weights are by tokens")
    validation: list[SourceConfig] = Field([], description="blend for evaluation; empty: no evaluation")
