"""What is evaluated while a stage trains, and whether the gate it waits for has opened."""

import math

import torch

from moba_train.config.run import GateConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import CheckpointError
from moba_train.evals.loss import validation_data, validation_loss
from moba_train.evals.position_wise import PositionWiseLoss, describe, position_wise_loss
from moba_train.evals.variants import name_of, with_full
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.parallel.stage import DataShard
from moba_train.telemetry.telemetry import Telemetry
from moba_train.training.progress import Progress


class StageEvaluation:
    """The evaluations of one stage; made on all ranks when the stage begins. Results go to `telemetry` as events.

    trailing_loss_before: at the end of the stage before, for a gate that refers to it. Raises DataError when a corpus
    is damaged, CheckpointError when the gate's reference was never evaluated.
    """

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        model: Transformer,
        share: DataShard,
        device: torch.device,
        telemetry: Telemetry,
        trailing_loss_before: float | None,
    ) -> None:
        self._config, self._stage, self._model = config.evaluation, stage, model
        self._head_width = config.model.head_width
        self._share, self._device, self._telemetry = share, device, telemetry
        self._trailing_loss_before = trailing_loss_before
        if stage.gate and not stage.gate.needs_full and trailing_loss_before is None:
            raise CheckpointError(
                f"stages[{stage.index}].until.trailing_loss_recovered.reference: given 'before', but the stage before "
                "was trained without evaluation.position_wise; set reference: full"
            )
        self._validation = validation_data(config, stage.seq_len)
        self.validated_step: int | None = None
        self.validation_loss = math.nan
        self._stretches: LongDocumentSamples | None = None
        if (wanted := self._config.position_wise) is not None:
            found = LongDocumentSamples(
                config.data.validation, stage.seq_len, wanted.sequences, config.seed, config.model.vocab_size
            )
            self._stretches = found if len(found) else None

    def after_step(self, progress: Progress, tokens: int) -> bool:
        """Make the evaluations that are due after the step `progress` stands at; whether the stage's gate has opened.

        Called on all ranks together, once for every step.
        """
        step, config = progress.step, self._config
        ends = step in (self._stage.planned_end_step, self._stage.end_step)
        if self._validation is not None and (ends or step % config.every == 0):
            loss = validation_loss(
                self._model, self._validation, self._stage.micro_batch_size, self._share, self._device
            )
            self._telemetry.event(step, tokens, "evaluation", f"validation loss {loss:.4f}", eval_loss=loss)
            self.validated_step, self.validation_loss = step, loss
        if config.position_wise is None or not (ends or step % (config.position_wise.every or config.every) == 0):
            return False
        if self._stretches is None:
            if ends:
                text = f"no document of data.validation is longer than {self._stage.seq_len} tokens"
                self._telemetry.event(step, tokens, "warning", f"{text}: no loss by position in this stage")
            return False
        return self._positions(self._stretches, config.position_wise.bucket, progress, tokens)

    def _positions(self, stretches: LongDocumentSamples, bucket: int, progress: Progress, tokens: int) -> bool:
        assert self._config.position_wise is not None
        own, gate = self._stage.attention, self._stage.gate
        kind, variants = name_of(own), with_full(own)
        if self._config.position_wise.attention == "own" and not (gate and gate.needs_full):
            variants = {kind: own}
        curves = {}
        for name, layers in variants.items():
            self._model.set_attention(build_attention(layers, self._head_width))
            curves[name] = position_wise_loss(self._model, stretches, bucket, self._share, self._device)
        self._model.set_attention(build_attention(own, self._head_width))
        text, fields, detail = describe(curves, kind)
        self._telemetry.event(progress.step, tokens, "position_wise", text, **fields, position_wise=detail)
        progress.trailing_loss = curves[kind].trailing
        if gate is None or progress.step < self._stage.planned_end_step:
            return False
        opened, text = judge(gate, curves, kind, self._trailing_loss_before)
        if not opened and progress.step == self._stage.end_step:
            text = f"{text}; the stage ends all the same, at its max_tokens"
        self._telemetry.event(progress.step, tokens, "gate", text)
        return opened


def judge(gate: GateConfig, curves: dict[str, PositionWiseLoss], kind: str, before: float | None) -> tuple[bool, str]:
    """Whether the trailing loss of the attention `kind` is back at the gate's reference, and the comparison in words.

    before: the trailing loss at the end of the stage before, for a gate that refers to it.
    """
    wanted = gate.trailing_loss_recovered
    reference = curves["full"].trailing if wanted.reference == "full" else before
    assert reference is not None
    trailing = curves[kind].trailing
    words = {"full": "with full attention on the same weights", "before": "at the end of the stage before"}
    opened = trailing <= reference + wanted.tolerance
    return opened, (
        f"gate {'opens' if opened else 'stays shut'}: trailing loss {trailing:.4f}, {reference:.4f} "
        f"{words[wanted.reference]}, tolerance {wanted.tolerance:g}"
    )
