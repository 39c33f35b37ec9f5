"""The sink for TensorBoard."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moba_train.output_files import make_folder
from moba_train.telemetry.telemetry import SinkRun, numbers


class TensorBoardSink:
    """Writes every number as a scalar over steps, and every event's message as text, to `folder`."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(folder)
        # `purge_step` hides earlier events of the steps that a resumed run repeats.
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_step is None else resumed_step + 1)

    @classmethod
    def problem(cls, setting: bool) -> str:
        """Reason why TensorBoard events cannot be written here, with the remedy; empty: they can."""
        if find_spec("tensorboard") is not None:
            return ""
        return "given true, but the package tensorboard is not installed; pip install tensorboard"

    @classmethod
    def open(cls, setting: object, run: SinkRun) -> "TensorBoardSink":
        """The sink of `telemetry.tensorboard: true`."""
        return cls(run.folder / "tensorboard", run.resumed_step)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if "message" in record:
            self._writer.add_text(record["type"], record["message"], record["step"])

    def close(self) -> None:
        self._writer.close()
