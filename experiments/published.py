"""Numbers that others have published, each with its place. Losses in nats per token, compute in PFLOP/s-days.

"MoBA" is Lu et al. 2025, arXiv:2502.13189, read in the report that its repository holds (MoBA_Tech_Report.pdf).
"""

from typing import NamedTuple


class Law(NamedTuple):
    """L(C) = a * C^b"""

    a: float
    b: float

    def __call__(self, compute: float) -> float:
        """Loss at `compute`."""
        return float(self.a * compute**self.b)


VALIDATION_8K = {"moba": Law(2.625, -0.063), "full": Law(2.622, -0.063)}
"""MoBA, figure 3c, "LM loss (seqlen=8K)": block 512, top-3, five models of 545M to 2.1B parameters (table 1)."""
VALIDATION_GAP = 1e-3
"""MoBA, section 3.1: validation losses "remain consistent within a range of 1e-3"."""

TRAILING_32K = {"moba": Law(1.546, -0.108), "full": Law(1.464, -0.097)}
"""MoBA, figure 3c, "Trailing LM loss (seqlen=32K, last 2K)": the same models and blocks, 95.31 % sparsity."""
TRAINED_COMPUTE = tuple(
    6 * parameters * tokens / (1e15 * 86400)
    for parameters, tokens in ((545e6, 10.8e9), (822e6, 15.3e9), (1.1e9, 20.6e9), (1.5e9, 27.4e9), (2.1e9, 36.9e9))
)
"""MoBA, table 1: 6ND of the five models, by parameters without embeddings and training tokens."""

POSITION_BUCKET = 2048
POSITION_32K = {
    "moba": (
        Law(3.075, -0.078),
        Law(2.415, -0.084),
        Law(2.085, -0.081),
        Law(1.899, -0.092),
        Law(1.789, -0.091),
        Law(1.721, -0.092),
        Law(1.670, -0.089),
        Law(1.630, -0.089),
        Law(1.607, -0.090),
        Law(1.586, -0.091),
        Law(1.571, -0.093),
        Law(1.566, -0.089),
        Law(1.565, -0.091),
        Law(1.562, -0.095),
        Law(1.547, -0.097),
        Law(1.546, -0.108),
    ),
    "full": (
        Law(3.068, -0.078),
        Law(2.411, -0.083),
        Law(2.077, -0.081),
        Law(1.894, -0.092),
        Law(1.774, -0.089),
        Law(1.697, -0.087),
        Law(1.645, -0.088),
        Law(1.600, -0.087),
        Law(1.567, -0.087),
        Law(1.542, -0.087),
        Law(1.519, -0.086),
        Law(1.513, -0.085),
        Law(1.502, -0.085),
        Law(1.493, -0.088),
        Law(1.471, -0.091),
        Law(1.464, -0.097),
    ),
}
"""MoBA, table 3: loss over compute by position in 32K tokens, 2K a bucket."""

GRANULARITY_LOSS = {8: 2.258, 16: 2.243, 32: 2.240, 64: 2.242, 128: 2.241}
"""MoBA, figure 4: loss of a 1.5B model at 32K by the number of blocks, of which a quarter is selected; read off the
plot, to about 0.001."""
GRANULARITY_FULL = 2.242
"""MoBA, figure 4: full attention, read off the plot."""
