"""Parameters of attention kinds that Muon takes for matrices."""

from tests.mechanisms.test_muon import COMMON_MATRICES, matrices_and_others


def test_of_attention_kinds_linear_layers_alone_are_matrices() -> None:
    """No convolution, position, decay or stack."""
    matrices, others = matrices_and_others(["moba", "kda", "nsa", "seer", "moba_v05", "lightning"])
    assert {f"blocks.{layer}.{name}.weight" for layer in range(6) for name in COMMON_MATRICES} <= matrices
    assert {"blocks.1.attention.kda.beta.weight", "blocks.2.attention.nsa.gates.weight"} <= matrices
    assert others == {
        *("embedding.weight", "output.weight", "blocks.0.attention.moba.weight"),
        *(f"blocks.1.attention.kda.{name}_conv.weight" for name in "qkv"),
        *(f"blocks.2.attention.nsa.compress_{name}.positions" for name in "kv"),
        *(f"blocks.3.attention.seer.{name}_weight" for name in "qk"),
    }
