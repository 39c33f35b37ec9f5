"""Where the tokens come from."""

from pydantic import Field

from moba_train.config.base import Section


class SourceConfig(Section):
    """One corpus in Megatron's indexed format: `path` names the pair `path.bin` and `path.idx`."""

    path: str = Field(min_length=1, description="corpus prefix: the file names without .bin/.idx")
    weight: float = Field(1.0, gt=0, description="share of the training tokens, relative to the other sources")


class DataConfig(Section):
    """Training and validation corpora, and the tokenizer that made them."""

    tokenizer: str | None = Field(
        None, description="sentencepiece model, or tokenizer.json or its folder; needed by generate, checked at start"
    )
    train: list[SourceConfig] = Field(min_length=1, description="blend of corpora; weights are by tokens")
    validation: list[SourceConfig] = Field([], description="blend for evaluation; empty: no evaluation")
