"""The rotary embedding of an exported model, in transformers and here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.full.full_kind import FullKind
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.tools.convert.hf_export import hf_config, write_safetensors
from moba_train.tools.hf.config import CONFIG
from moba_train.tools.hf.family import family_of
from tests.tools.convert.hf_models import logits, our_model, random_tokens

MODEL = ModelConfig(
    vocab_size=64, hidden_size=48, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=12, init_std=0.3
)
ORIGINAL = 64
LENGTH = 256
"""Tokens that a model was trained on before its embedding was scaled, and after."""
ROPES = {
    "none": RopeConfig(theta=3e4),
    "abf": RopeConfig(kind="abf", theta=5e5),
    "pi": RopeConfig(kind="pi", theta=3e4, factor=4),
    "yarn": RopeConfig(kind="yarn", theta=3e4, factor=4, original_seq_len=ORIGINAL),
    "llama3": RopeConfig(kind="llama3", theta=3e4, factor=4, original_seq_len=ORIGINAL),
}
LOGITS = """
import sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
torch.save(model(torch.load(sys.argv[2])[None]).logits[0].detach(), sys.argv[3])
"""


def model_with(rope: RopeConfig) -> Transformer:
    """A model whose weights are always the same."""
    model = Transformer(MODEL.model_copy(update={"rope": rope}))
    initialize_weights(model, seed=3)
    model.set_attention([FullKind(FullKind.Options(), MODEL.head_width)] * MODEL.layers)
    return model


@pytest.fixture
def exported(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of an exported model, whose embedding is the test's `name`."""
    rope = ROPES[request.getfixturevalue("name")]
    model = model_with(rope)
    config: dict[str, Any] = hf_config(MODEL.model_copy(update={"rope": rope}), rope, LENGTH, "float32")
    family = family_of(config["model_type"])
    tensors = [(family.name(name), value.detach()) for name, value in model.named_parameters()]
    write_safetensors(tmp_path, tensors, shard_bytes=1 << 30)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    return tmp_path


def assert_close(got_TV: Tensor, want_TV: Tensor) -> None:
    """Equal up to the rounding of float32."""
    assert ((got_TV - want_TV).abs().max() / want_TV.abs().max()).item() < 1e-5


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [ORIGINAL // 4, ORIGINAL, LENGTH])
def test_transformers_rotates_an_export_as_training_did(exported: Path, name: str, length: int) -> None:
    """vllm PR#42624, unsloth PR#7028: rope_theta is lost between transformers 4 and 5, and a base of 10,000 is taken.
    Megatron-Bridge#3063: YaRN differs below the length that it extends; here also at a quarter of the trained one."""
    from transformers import AutoModelForCausalLM

    tokens_T = random_tokens(length)
    with torch.no_grad():
        theirs_TV = AutoModelForCausalLM.from_pretrained(exported).eval()(tokens_T[None]).logits[0]
    ours_TV = logits(model_with(ROPES[name]), tokens_T)
    assert_close(theirs_TV, ours_TV)
    assert_close(logits(our_model(exported), tokens_T), ours_TV)
    longer_TV = logits(model_with(ROPES[name]), random_tokens(LENGTH).index_copy(0, torch.arange(length), tokens_T))
    assert_close(longer_TV[:length], ours_TV)


@pytest.mark.skipif("MOBA_TRANSFORMERS_4" not in os.environ, reason="MOBA_TRANSFORMERS_4 names a folder that has it")
@pytest.mark.parametrize("name", ROPES)
def test_transformers_4_rotates_it_so_as_well(exported: Path, name: str, tmp_path: Path) -> None:
    """vllm PR#42624, unsloth PR#7028, as above. The folder: pip install --no-deps --target FOLDER "transformers<5"
    "huggingface_hub<1" "tokenizers<0.23"."""
    tokens_T = random_tokens(LENGTH)
    torch.save(tokens_T, tmp_path / "tokens.pt")
    files = [str(tmp_path / name) for name in ("tokens.pt", "logits.pt")]
    environment = os.environ | {"PYTHONPATH": os.environ["MOBA_TRANSFORMERS_4"]}
    subprocess.run([sys.executable, "-c", LOGITS, str(exported), *files], env=environment, check=True)
    assert_close(torch.load(files[1]), logits(model_with(ROPES[name]), tokens_T))


@pytest.mark.parametrize("name", [name for name in ROPES if name != "none"])
def test_every_scaling_of_the_embedding_changes_what_a_loaded_model_says(exported: Path, name: str) -> None:
    """Soup#793: the scaling that a config asks for does nothing once the model is loaded."""
    tokens_T = random_tokens(LENGTH)
    plain_TV = logits(model_with(ROPES["none"]), tokens_T)
    loaded_TV = logits(our_model(exported), tokens_T)
    assert ((loaded_TV - plain_TV).abs().max() / plain_TV.abs().max()).item() > 1e-2
    changed = model_with(ROPES["none"])
    changed.set_rope(ROPES[name])
    assert_close(logits(changed, tokens_T), loaded_TV)
