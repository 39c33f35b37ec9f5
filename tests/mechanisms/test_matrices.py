"""Parameters of attention kinds that Muon takes for matrices."""

import torch

from moba_train.config.schema import RunConfig
from moba_train.model.build import build_model
from moba_train.optim.spec import block_matrices
from tests.resolved import spec_of


def test_which_parameters_of_a_model_are_matrices() -> None:
    """Every projection by itself; of attention kinds linear layers alone: no convolution, position, decay or stack."""
    kinds = ["moba", "kda", "nsa", "seer", "moba_v05", "lightning"]
    config = RunConfig.model_validate(
        {
            "name": "kinds",
            "run_dir": "unused",
            "model": {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "layers": 6, "heads": 4}
            | {"kv_heads": 2, "qkv_bias": True, "qk_norm": True},
            "attention": {
                "default": "moba",
                "moba": {"block_size": 16, "topk": 2, "key_conv": 3},
                "overrides": {layer: {"kind": kind} for layer, kind in enumerate(kinds) if layer},
            },
            "data": {"train": [{"path": "a"}]},
            "batch_tokens": 512,
            "stages": [{"name": "only", "seq_len": 64, "tokens": 512}],
        }
    )
    with torch.device("meta"):
        model = build_model(spec_of(config))
    matrices = block_matrices(model)
    common = {f"attention.{part}_proj" for part in "qkvo"} | {f"feed_forward.{p}_proj" for p in ("gate", "up", "down")}
    assert {f"blocks.{layer}.{name}.weight" for layer in range(6) for name in common} <= matrices.keys()
    assert {"blocks.1.attention.kda.beta.weight", "blocks.2.attention.nsa.gates.weight"} <= matrices.keys()
    others = {name for name, parameter in model.named_parameters() if parameter.dim() > 1} - matrices.keys()
    assert others == {
        *("embedding.weight", "output.weight", "blocks.0.attention.moba.weight"),
        *(f"blocks.1.attention.kda.{name}_conv.weight" for name in "qkv"),
        *(f"blocks.2.attention.nsa.compress_{name}.positions" for name in "kv"),
        *(f"blocks.3.attention.seer.{name}_weight" for name in "qk"),
    }
