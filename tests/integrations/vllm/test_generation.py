"""vLLM with the plugin continues prompts as `moba-train generate` does, token by token: where vLLM is installed.

MOBA_VLLM_TOKENS: length of the longest of 50 prompts; 32768 for the long form, whose model is a miniature; 500 unless
given.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moba_train.attention.layout import packed_layout
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import model_tensors
from moba_train.config.load import dump_config
from moba_train.config.schema import RunConfig
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import joined_world
from moba_train.run.progress import Progress
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.inference.generate import Sampling, generate_batch
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.tools.convert.hf_models import VOCAB, make_hf_model, our_model

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: integrations/vllm/README.md says how"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]
PLUGIN = Path(__file__).parents[3] / "integrations" / "vllm"
LONGEST = int(os.environ.get("MOBA_VLLM_TOKENS", "500"))
NEW = 20
PAGE = 32
ROPE: dict[str, dict[str, Any]] = {
    # vLLM knows the angles of `factor` times the original length, no more.
    "qwen3": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LONGEST // 2},
    "llama2": {"rope_theta": 1e4},
}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        {"kind": "moba", "block_size": 64, "topk": 3},
        {"kind": "moba", "block_size": 32, "topk": 4, "select": "group", "always": ["current", "first"]},
        {"kind": "window", "window": 48, "sinks": 4},
        {"kind": "full"},
    ],
    "llama2": [
        {"kind": "full"},
        {"kind": "moba", "block_size": 16, "topk": 5, "select": "group"},
        {"kind": "moba", "block_size": 32, "topk": 2, "always": ["current", "previous"]},
        {"kind": "window", "window": 100},
    ],
}
SHAPE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
if LONGEST > 4096:
    LAYERS = {"llama2": [{"kind": "moba", "block_size": 256, "topk": 4}, {"kind": "full"}]}
    SHAPE |= {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}


class Exported(NamedTuple):
    """Our model, its export, and 50 prompts with what we say to them by each way of decoding."""

    model: Transformer
    folder: Path
    prompts: list[list[int]]
    continued: dict[str, list[list[int]]]


def make_prompts() -> list[list[int]]:
    """50 prompts of all lengths; every fourth begins with the longest one's text, up to anywhere in a page."""
    generator = torch.Generator().manual_seed(11)
    # Of the long form most are shorter, as the work of all grows with their squares.
    lengths = LONGEST * torch.rand(50, generator=generator) ** (6 if LONGEST > 4096 else 1) + 1
    lengths[:4] = torch.tensor([LONGEST, 1, PAGE, 2 * PAGE + 1])
    prompts = [torch.randint(VOCAB, (int(length),), generator=generator).tolist() for length in lengths]
    for prompt in prompts[4::4]:
        half = len(prompt) // 2
        prompt[:half] = prompts[0][:half]
    return prompts


@pytest.fixture(scope="module", params=[*LAYERS])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    length = LONGEST + 2 * NEW
    shape = SHAPE | {"num_hidden_layers": len(LAYERS[request.param]), "max_position_embeddings": length}
    make_hf_model(request.param, folder / "hf", rope_parameters=ROPE[request.param], **shape)
    recipe = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "model": read_model_config(folder / "hf").model_dump(),
        "attention": {"default": "full", "overrides": dict(enumerate(LAYERS[request.param]))},
        "data": {"train": [{"path": "none"}]},
        "batch_tokens": length,
        "stages": [{"name": "long", "seq_len": length, "tokens": length}],
    }
    with joined_world():
        checkpointer = Checkpointer(folder / "run" / "checkpoints", Retention(1))
        meta = {"progress": Progress().to_meta(), "config": dump_config(RunConfig.model_validate(recipe))}
        checkpointer.save(1, model_tensors(our_model(folder / "hf")), meta)
        checkpointer.close()
    saved = open_checkpoint(folder / "run")
    export_to_hf(saved, folder / "out", torch.float32, shard_bytes=2**30)
    model = load_trained(saved, torch.device("cpu"), torch.float32)
    prompts = make_prompts()
    continued: dict[str, list[list[int]]] = {}
    for decode in ("full", "own"):
        rows: list[list[int]] = [[] for _ in prompts]
        for step in generate_batch(model, prompts, NEW, Sampling(temperature=0), decode=decode):
            for index, token in step.items():
                rows[index].append(token)
        continued[decode] = rows
    return Exported(model, folder / "out", prompts, continued)


def ask(folder: Path, engine: dict[str, Any], plugin: bool = True, **request: Any) -> dict[str, Any]:
    """Texts of vLLM, in a process of its own that finds the plugin by its entry point."""
    installed = folder / "installed" / "moba_vllm-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    entries = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: moba-vllm\nVersion: 0\n")
    ours = [str(PLUGIN), str(installed.parent)] if plugin else []
    paths = [str(PLUGIN.parents[1]), *ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRITON_F32_DEFAULT": "ieee",  # on a GPU Triton would round what it multiplies to TF32
    }
    usual = {
        "block_size": PAGE,
        "kv_cache_memory_bytes": 2**30,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 65536,
        "enforce_eager": True,
    }
    file = folder / "request.json"
    engine = {"model": str(folder), **usual, **engine}
    file.write_text(json.dumps({"engine": engine, "tokens": NEW, **request}))
    program = [sys.executable, "-m", "tests.integrations.vllm.answers", str(file)]
    answered = subprocess.run(
        program, env=os.environ | environment, cwd=PLUGIN.parents[1], text=True, capture_output=True
    )
    assert answered.returncode == 0, answered.stderr[-40000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def decodes(mode: str) -> dict[str, Any]:
    return {"hf_overrides": {"moba_decode": mode}}


@pytest.mark.parametrize("decode", ["full", "own"])
def test_one_pass(exported: Exported, decode: str) -> None:
    """Every prompt in one pass: our tokens, and our probabilities of a prompt's tokens."""
    scored = exported.prompts[0]
    found = ask(exported.folder, decodes(decode), rounds=[exported.prompts], scored=scored)
    assert found["tokens"][0] == exported.continued[decode]
    with torch.no_grad():
        logits = exported.model(torch.tensor(scored), torch.arange(len(scored)), packed_layout([len(scored)]))
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(scored[1:])[:, None])[:, 0]
    far = (torch.tensor(found["scores"]) - expected).abs() > 2e-4
    assert far.sum() <= len(scored) // 10_000  # of long prompts: for some tokens two blocks fit equally well


def test_it_is_the_plugin_that_does_it(exported: Exported) -> None:
    """Without it vLLM runs another model, with full attention; and our two ways of decoding are two."""
    found = ask(exported.folder, {}, plugin=False, rounds=[exported.prompts])
    same = sum(ours == theirs for ours, theirs in zip(exported.continued["full"], found["tokens"][0], strict=True))
    assert same < 25
    assert exported.continued["full"] != exported.continued["own"]
    assert len({token for row in exported.continued["full"] for token in row}) > 10


@pytest.mark.parametrize("decode", ["full", "own"])
def test_chunked_prefill_and_prefix_caching(exported: Exported, decode: str) -> None:
    """Chunks that fill no block, decoded together with others' prompts; then again, from the prefix cache."""
    chunk = max(96, LONGEST // 7)
    engine = {"max_num_batched_tokens": chunk, "max_num_seqs": 16, "enable_prefix_caching": True}
    found = ask(exported.folder, engine | decodes(decode), rounds=[exported.prompts] * 2)
    assert found["tokens"] == [exported.continued[decode]] * 2
    assert sum(found["cached"][1]) > sum(map(len, exported.prompts)) / 2


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks of vLLM need two GPUs, or none")
@pytest.mark.parametrize("decode", ["full", "own"])
def test_tensor_parallel(exported: Exported, decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has half of the heads, with the groups that belong to them."""
    if SHAPE["num_key_value_heads"] < 2:
        pytest.skip("the long form's miniature has one key/value head")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # it wants a NUMA node for each rank unless told
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    found = ask(exported.folder, engine | decodes(decode), rounds=[exported.prompts])
    assert found["tokens"][0] == exported.continued[decode]
