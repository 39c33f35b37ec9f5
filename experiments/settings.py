"""F0: batch, learning rate and initial weights that the other figures train with, chosen with full attention alone."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, GREEN, INK, PURPLE
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, TOKENS_PER_PARAMETER, learning_rate, parameters, recipe, staged
from experiments.readings import validation_loss

SIZE = "4m"
FIRST_RATE = 3e-3
"""The rate that the figures began with, at a width of 256."""


class Setting(NamedTuple):
    """What an arm is trained with."""

    batch_tokens: int
    rate: float
    """Peak learning rate in units of `FIRST_RATE`."""
    init_std: float | None = None
    """Standard deviation of initial weights; None: the trainer's default, 0.02."""
    short: float = 0.0
    """Share of the tokens that it begins with in sequences of 1K."""
    tied: bool = True
    """Whether embedding and output projection are one matrix."""

    def __str__(self) -> str:
        words = [f"{self.batch_tokens // 1024}K", f"{self.rate * FIRST_RATE:g}"]
        words += [f"initial std {self.init_std:g}"] if self.init_std is not None else []
        words += [f"first {self.short:.0%} at 1K"] if self.short else []
        return ", ".join(words + ["untied"] * (not self.tied))


WIDE = 1 / 16
"""The root of 1 / 256, the width of the model."""
ARMS = {
    "32k-x0.5-init": Setting(32_768, 0.5, WIDE),
    "32k-x0.5-init-short": Setting(32_768, 0.5, WIDE, short=0.2),
    "32k-x0.5-init-untied": Setting(32_768, 0.5, WIDE, tied=False),
    "32k-x0.5": Setting(32_768, 0.5),
    "32k-x1": Setting(32_768, 1.0),
    "32k-x0.25-init": Setting(32_768, 0.25, WIDE),
    "32k-x0.125-init": Setting(32_768, 0.125, WIDE),
    "128k-x0.5": Setting(131_072, 0.5),
    "128k-x1": Setting(131_072, 1.0),
}
"""By name, in the order in which they are worth running."""
_COLOURS = {"short": BLUE, "untied": GREEN, "32k": PURPLE, "128k": INK}
"""By the first of these that an arm's name contains."""
_STYLES = {1.0: "-", 0.5: "--", 0.25: ":", 0.125: "-."}


class Settings(Figure):
    """Batch, learning rate and initial weights of the other figures: the loss of full attention with several."""

    name = "settings"
    height = 4.2
    title = "F0. Batch and learning rate"
    seeds: ClassVar[tuple[int, ...]] = (0,)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """An arm for each batch and rate."""
        size, length = ("tiny", 256) if quick else (SIZE, 8192)
        tokens = 8192 if quick else TOKENS_PER_PARAMETER * parameters(SIZE)
        arms = []
        for name, setting in ARMS.items():
            batch_tokens = setting.batch_tokens // (64 if quick else 1)
            made = recipe(size, FULL, length, tokens, batch_tokens, {"sequences": 4 if quick else 256})
            made["optim"] = {**made["optim"], "lr": learning_rate(size, setting.rate * FIRST_RATE)}
            made["stages"] = staged(length, tokens, setting.short)
            made["model"] = {**made["model"], "tie_embeddings": setting.tied, "init_std": setting.init_std}
            if setting.init_std is None:
                del made["model"]["init_std"]
            arms.append(Arm(name, seed, made))
        return arms

    def find(self, results: Sequence[Result]) -> Finding:
        """Validation loss, steps, largest gradient norm of the second half and spikes of each arm."""
        rows = [["batch, rate", "steps", "validation loss", "largest gradient norm, second half", "flagged steps"]]
        for result in results:
            norms = [norm for _, norm in result["gradient_norms"]]
            cells = [f"{validation_loss(result):.4f}", f"{max(norms[len(norms) // 2 :]):.2f}"]
            rows.append([str(ARMS[result["name"]]), str(result["last_step"]), *cells, str(len(result["spikes"]))])
        return Finding([], rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Training loss over tokens."""
        axes = canvas.subplots()
        for result in results:
            setting = ARMS[result["name"]]
            tokens = [step * result["recipe"]["batch_tokens"] / 1e6 for step, _ in result["losses"]]
            losses = [loss for _, loss in result["losses"]]
            width = 1.2 if setting.init_std is None else 2
            colour = next(colour for part, colour in _COLOURS.items() if part in result["name"])
            axes.plot(tokens, losses, _STYLES[setting.rate], lw=width, color=colour, label=str(setting))
        axes.set_xlabel("million tokens")
        axes.set_ylabel("training loss, nats")
        canvas.legend(loc="outside upper left", ncols=2, fontsize=8)
