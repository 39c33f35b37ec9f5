"""TensorBoard events, if the recipe asks for them (`telemetry.tensorboard: true`)."""

from pathlib import Path
from typing import Any

from moba_train.errors import UserError
from moba_train.telemetry.numbers import numbers


class TensorBoardSink:
    """Writes every number as a scalar over steps, and every event's message as text, to `folder`.

    Raises UserError if the package tensorboard is missing.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"telemetry.tensorboard is true, but the tensorboard package cannot be imported ({error}); "
                "`pip install tensorboard`, or set telemetry.tensorboard to false"
            ) from error
        # `purge_step` hides earlier events of the steps that a resumed run repeats.
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_step is None else resumed_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if "message" in record:
            self._writer.add_text(record["type"], record["message"], record["step"])

    def close(self) -> None:
        self._writer.close()
