"""The kernels that an export takes with it: found by its code where moba_train cannot be imported, and used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moba_train.attention.kernels.table import has_triton
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.convert.with_code import FOLDER
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.tools.convert import with_kernels
from tests.tools.convert.code_models import SIZES, save_model
from tests.tools.convert.hf_models import logits, random_tokens

TOKENS = random_tokens(90)
MODEL = SIZES | {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "sink_layers": [0]}
LAYERS = [
    {"kind": "moba", "block_size": 64, "topk": 2},
    {"kind": "msa", "block_size": 64, "topk": 2, "index_dim": 16},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in `out`, from the run next to it."""
    root = tmp_path_factory.mktemp("kernels")
    save_model(root, MODEL, LAYERS)
    export_to_hf(open_checkpoint(root / "run"), root / "out", torch.float32, 2**30, with_code=True)
    torch.save(TOKENS, root / "tokens.pt")
    return root


def asked(root: Path, device: str, dtype: str, **environment: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Logits [T, V] of the export, the layers in which kernels attended to blocks, and the logits without their
    folder, from another process."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    kept |= {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, with_kernels.__file__, device, dtype], env=kept, cwd=root, check=True)
    found: tuple[torch.Tensor, int, torch.Tensor] = torch.load(root / "answers.pt")
    return found


def test_the_folder_is_a_package_by_itself(folder: Path) -> None:
    """In the layout of the kernels hub: relative imports, no dependency, the keys that `kernels` 0.17 needs."""
    package = folder / "out" / FOLDER
    metadata = json.loads((package / "metadata.json").read_text())
    assert metadata.keys() >= {"name", "id", "version", "license", "backend"}
    assert re.fullmatch("[a-z][a-z0-9-]*[a-z0-9]", metadata["name"])
    assert metadata["python-depends"] == []
    imports = [line for file in package.rglob("*.py") for line in file.read_text().splitlines() if "import" in line]
    assert len(imports) > 100
    assert [line for line in imports if line.strip().startswith(("from moba_train", "import moba_train"))] == []


def test_hugging_faces_program_loads_it(folder: Path) -> None:
    kernels = pytest.importorskip("kernels")
    assert callable(kernels.get_local_kernel(folder / "out" / "kernels").attend_to_blocks)


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_interpreted_kernels_say_what_ours_says(folder: Path) -> None:
    said, kernel_layers, plain = asked(folder, "cpu", "float32", TRITON_INTERPRET="1")
    assert kernel_layers == len(LAYERS)
    model = load_trained(open_checkpoint(folder / "run"), torch.device("cpu"), torch.float64)
    expected = logits(model, TOKENS).float()
    for found in (said, plain):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_kernels_on_a_gpu_say_what_plain_pytorch_says(folder: Path) -> None:
    said, kernel_layers, plain = asked(folder, "cuda", "bfloat16")
    assert kernel_layers == len(LAYERS)
    assert (said - plain).abs().median() < 0.05 < plain.std()
