"""Exports as published models with sparse attention: MiniMax-M3 in transformers, and MiniCPM 4.1."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.errors import CheckpointError
from moba_train.tools.cli import app
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.commands import run_app
from tests.tools.convert import with_minicpm
from tests.tools.convert.code_models import SIZES, save_model
from tests.tools.convert.hf_models import logits, random_tokens

TOKENS = random_tokens(150)
MINIMAX = "minimax_m3_vl_text"
M3 = SIZES | {
    **{"qk_norm": True, "centered_norms": True, "activation": "clamped", "norm_eps": 1e-6},
    "rope": {"fraction": 0.5, "theta": 5e6},
}
MSA = {"kind": "msa", "block_size": 16, "topk": 3}
MINICPM = SIZES | {"embedding_scale": 12.0, "residual_scale": 1.4 / 3**0.5, "logits_divisor": 1.5}
INFLLM: dict[str, Any] = {"kind": "infllm_v2", "block_size": 16, "topk": 5, "local_blocks": 2}
INFLLM |= {"window": 8, "stride": 4, "dense_len": 32}


def export(folder: Path, model: dict[str, Any], layers: list[dict[str, Any]], model_type: str) -> None:
    """Write `folder`/out, from the run next to it."""
    save_model(folder, model, layers)
    saved = open_checkpoint(folder / "run")
    export_to_hf(saved, folder / "out", torch.float32, 2**30, model_type=model_type)


def check_it_comes_back(folder: Path) -> torch.Tensor:
    """Logits of the run in `folder`, which its export has as well when it is read again."""
    model = load_trained(open_checkpoint(folder / "run"), torch.device("cpu"), torch.float64)
    import_from_hf(folder / "out", folder / "again")
    again = load_trained(open_checkpoint(folder / "again"), torch.device("cpu"), torch.float64)
    expected = logits(model, TOKENS)
    torch.testing.assert_close(logits(again, TOKENS), expected, rtol=0, atol=0)
    return expected


def test_transformers_runs_msa_as_minimax_m3(tmp_path: Path) -> None:
    """Without our code, layer by layer as trained: full attention in the first, other blocks than all in the others."""
    from transformers import AutoModelForCausalLM

    export(tmp_path, M3, [{"kind": "full"}, MSA, MSA], MINIMAX)
    expected = check_it_comes_back(tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Programs that know this architecture run it with the attention above.\n" in card
    assert "trust_remote_code" not in card
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "MiniMaxM3VLForCausalLM"
    with torch.no_grad():
        found = theirs(TOKENS[None]).logits[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_infllm_v2_goes_out_as_minicpm(tmp_path: Path) -> None:
    export(tmp_path, MINICPM, [INFLLM] * 3, "minicpm")
    check_it_comes_back(tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MiniCPMForCausalLM"]
    assert "from_pretrained(FOLDER, trust_remote_code=True)" in (tmp_path / "out" / "README.md").read_text()
    assert config["sparse_config"] == {
        **{"kernel_size": 8, "kernel_stride": 4, "init_blocks": 1, "block_size": 16, "window_size": 32, "topk": 3},
        **{"use_nope": False, "dense_len": 32},
    }
    assert (config["scale_emb"], config["dim_model_base"]) == (12, 32)
    assert config["scale_depth"] == pytest.approx(1.4)


@pytest.mark.parametrize("layer", [{"kind": "full"}, INFLLM], ids=lambda layer: layer["kind"])
def test_logits_are_those_of_minicpms_published_code(tmp_path: Path, layer: dict[str, Any]) -> None:
    """MOBA_TRAIN_MINICPM names a folder with it, MOBA_EXPORT_PYTHON a Python with a release of transformers that runs
    it. Its sparse attention needs a CUDA extension, for which plain PyTorch stands here."""
    code = os.environ.get("MOBA_TRAIN_MINICPM")
    if code is None:
        pytest.skip("no package has MiniCPM 4's code; MOBA_TRAIN_MINICPM names a folder with it")
    export(tmp_path, MINICPM, [layer] * 3, "minicpm")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    python = os.environ.get("MOBA_EXPORT_PYTHON", sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, with_minicpm.__file__, code, "out"], cwd=tmp_path, env=environment, check=True)
    expected = check_it_comes_back(tmp_path)
    found = torch.load(tmp_path / "answers.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("model", "layers", "model_type", "said"),
    [
        (
            M3,
            [MSA, MSA, MSA | {"topk": 4}],
            "minimax_m3_vl_text",
            "layer 2: topk is 4; minimax_m3_vl_text has 3",
        ),
        (M3, [MSA | {"index_dim": 4}] * 3, MINIMAX, "index_head_dim is 4, allowed: 8"),
        (M3, [MSA | {"index_keys": "group"}] * 3, MINIMAX, "index_keys is 'group'; minimax_m3_vl_text has 'shared'"),
        (
            M3,
            [{"kind": "moba", "block_size": 16, "topk": 3}] * 3,
            "minimax_m3_vl_text",
            "attention of layer 0: kind is 'moba'",
        ),
        (M3 | {"activation": "silu"}, [MSA] * 3, MINIMAX, "activation is 'clamped', not 'silu'"),
        (
            MINICPM,
            [INFLLM, INFLLM, {"kind": "full"}],
            "minicpm",
            "attention of layer 2: kind is null; minicpm has 'infllm_v2'",
        ),
        (MINICPM, [MSA] * 3, "minicpm", "minicpm: kind 'msa' of layer 0: allowed in MiniCPM: full, infllm_v2"),
        (MINICPM | {"qk_norm": True}, [INFLLM] * 3, "minicpm", "qk_norm is false, not true"),
        (MINICPM, [INFLLM] * 3, "minicpm5", "model_type is 'minicpm5', allowed: llama"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(
    tmp_path: Path, model: dict[str, Any], layers: list[dict[str, Any]], model_type: str, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path, model, layers, model_type)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_family_and_warns_of_what_its_code_does_otherwise(tmp_path: Path) -> None:
    save_model(tmp_path, MINICPM, [INFLLM | {"dense_len": 96}] * 3)
    command = ["convert", "moba-to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--as", "minicpm"]
    done = run_app(app, *command)
    assert "warning: in texts longer than dense_len (96)" in done.stderr
    assert "at the positions from 80 to dense_len" in done.stderr
    refused = run_app(app, *command, "--with-code", code=2)
    assert "--as: given 'minicpm' with --with-code; allowed: one of the two" in refused.stderr
