"""Config files of transformers 4 are the models that those of transformers 5 are.

`fixtures/transformers_4.json` has the config.json of each model in hf_models.py, as transformers 4.57.6 wrote it. With
`MOBA_TRANSFORMERS_4=PYTHON`, a Python that has transformers 4 and torch, it is written again, and models go in and out.
"""

import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.hf.config import read_family, read_model_config
from moba_train.tools.saved_recipe import open_checkpoint
from tests.tools.convert.hf_models import FAMILIES, SHAPE, logits, our_model, random_tokens
from tests.tools.convert.test_hf_export import tensors

RECORDED = Path(__file__).parents[2] / "fixtures" / "transformers_4.json"
SHAPES = {name: SHAPE | shape for name, shape in FAMILIES.items()}
# transformers 4 does not read the first key, and clamps all of gpt-oss at 7; its default of the second is 0.9.
SHAPES["gpt_oss"] |= {"swiglu_limit": 7.0, "router_aux_loss_coef": 0.001}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_transformers_4_is_the_model_that_5_writes(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(**deepcopy(SHAPES[name])).save_pretrained(tmp_path)
    later = json.loads((tmp_path / "config.json").read_text())
    earlier = json.loads(RECORDED.read_text())[name]
    assert "rope_theta" in earlier
    assert "rope_parameters" in later
    found = []
    for config in (later, earlier):
        (tmp_path / "config.json").write_text(json.dumps(config))
        family, read = read_family(tmp_path)
        found.append((read_model_config(tmp_path), family.attention(read), family.unread(read)))
    assert found[0] == found[1]
    assert found[0][2] == []


@pytest.mark.skipif("MOBA_TRANSFORMERS_4" not in os.environ, reason="MOBA_TRANSFORMERS_4=PYTHON asks for it")
def test_models_of_transformers_4_go_in_and_out(tmp_path: Path) -> None:
    def with_4(what: str) -> None:
        program = Path(__file__).with_name("with_transformers_4.py")
        subprocess.run([os.environ["MOBA_TRANSFORMERS_4"], program, what, tmp_path], check=True)

    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    with_4("write")
    recorded = json.loads(RECORDED.read_text())
    for name in FAMILIES:
        folder = tmp_path / name
        assert json.loads((folder / "hf" / "config.json").read_text()) == recorded[name]
        expected = torch.load(folder / "logits.pt")
        difference = (logits(our_model(folder / "hf"), random_tokens(200)) - expected).abs().max()
        # Of Qwen3-Next, theirs is 3e-5 and ours 1.5e-5 from the logits in float64.
        assert difference < (1e-4 if name == "qwen3_next" else 2e-6) * expected.abs().max(), name
        import_from_hf(folder / "hf", folder / "run")
        export_to_hf(open_checkpoint(folder / "run"), folder / "out", torch.float32, shard_bytes=2**30)
        before = tensors(folder / "hf")
        after = tensors(folder / "out")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name
    with_4("read")
    for name, found in torch.load(tmp_path / "logits.pt").items():
        assert torch.equal(found, torch.load(tmp_path / name / "logits.pt")), name
