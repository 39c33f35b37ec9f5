"""F0: batch, learning rate and initial weights that the other figures train with, chosen with full attention alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.plotting import GREY, titled
from experiments.figure import Arm, Figure, Finding, Result
from experiments.fits import validation_loss
from experiments.models import FULL, TOKENS_PER_PARAMETER, learning_rate, parameters, recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SIZE = "4m"
FIRST_RATE = 3e-3
"""The rate that the figures began with, at a width of 256."""
BATCHES = {"32k": 32_768, "128k": 131_072}
"""Tokens of a batch, by the name of the arm."""
ARMS = {
    "32k-x0.5": ("32k", 0.5, None),
    "32k-x1": ("32k", 1.0, None),
    "32k-x0.5-init": ("32k", 0.5, 1 / 16),
    "32k-x0.25": ("32k", 0.25, None),
    "128k-x0.5": ("128k", 0.5, None),
    "128k-x1": ("128k", 1.0, None),
}
"""Batch, peak learning rate in units of `FIRST_RATE`, and standard deviation of initial weights (None: 0.02),
in the order in which they are worth running. 1/16 is the root of 1 / 256, the width of the model."""
_COLOURS = {"32k": "#d9480f", "128k": GREY}
_STYLES = {1.0: "-", 0.5: "--", 0.25: ":"}


class Settings(Figure):
    """Batch, learning rate and initial weights of the other figures: the loss of full attention with several."""

    name = "settings"
    title = "F0. Batch and learning rate"
    claim = "Nothing: this is no claim of the paper's. The other figures take their batch and learning rate from here."
    setup = (
        "A model of 4M parameters with full attention, 20 tokens for each, at 8K, one cosine; batches of 32K and 128K "
        "tokens, and once initial weights that are larger, as the model is narrow. No arm has MoBA, so that the choice "
        "cannot favour it. A first F5 ([file](../experiments/results/hybrid-first.json)), of 9.7M parameters, was "
        "trained with batches of 128K tokens and a rate of 3e-3 at a width of 256, in 1,486 steps: its arms fell "
        "steeply between the 500th and 700th step, one earlier than another, and were 0.08 nats apart at the end even "
        "in the first 512 tokens, where both attentions are one function."
    )
    found: ClassVar[str] = (
        "One arm has ended, with batches of 128K tokens; two with batches of 32K tokens were lost with their machine "
        "before they ended, so nothing can be compared yet. The other figures keep their batch and rate until it can."
    )
    seeds: ClassVar[int] = 1

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """An arm for each batch and rate."""
        size, length = ("tiny", 256) if quick else (SIZE, 8192)
        tokens = 8192 if quick else TOKENS_PER_PARAMETER * parameters(SIZE)
        arms = []
        for name, (batch, rate, std) in ARMS.items():
            batch_tokens = BATCHES[batch] // (64 if quick else 1)
            made = recipe(size, FULL, length, tokens, batch_tokens, {"sequences": 4 if quick else 256})
            made["optim"] = {**made["optim"], "lr": learning_rate(size, rate * FIRST_RATE)}
            if std is not None:
                made["model"] = {**made["model"], "init_std": std}
            arms.append(Arm(name, seed, made))
        return arms

    def find(self, results: Sequence[Result]) -> Finding:
        """Validation loss, steps, largest gradient norm of the second half and spikes of each arm."""
        rows = [["batch, rate", "steps", "validation loss", "largest gradient norm, second half", "spikes"]]
        for result in results:
            norms = [norm for _, norm in result["gradient_norms"]]
            cells = [f"{validation_loss(result):.4f}", f"{max(norms[len(norms) // 2 :]):.2f}"]
            rows.append([_label(result), str(result["last_step"]), *cells, str(len(result["spikes"]))])
        return Finding([], rows)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """Training loss over tokens."""
        axes = canvas.subplots()
        for result in results:
            batch, rate, std = ARMS[result["name"]]
            tokens = [step * result["recipe"]["batch_tokens"] / 1e6 for step, _ in result["losses"]]
            losses = [loss for _, loss in result["losses"]]
            width = 1.2 if std is None else 2
            axes.plot(tokens, losses, _STYLES[rate], lw=width, color=_COLOURS[batch], label=_label(result))
        titled(axes, "training loss, nats", "million tokens")
        axes.legend(frameon=False, labelcolor=GREY, fontsize=9)


def _label(result: Result) -> str:
    batch, rate, std = ARMS[result["name"]]
    return f"{batch.upper()}, x{rate:g}" + (f", weights of {std:g}" if std is not None else "")
