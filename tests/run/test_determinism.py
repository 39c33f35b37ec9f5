"""`deterministic: true` gives the same bits again."""

from pathlib import Path

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import packed_layout
from moba_train.checkpoint.manifest import read_meta
from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from moba_train.run.determinism import deterministic
from tests.resolved import check
from tests.run.tiny_run import Run, assert_same_tensors


def test_the_same_recipe_gives_the_same_bits(run: Run, corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    again = Run(tmp_path / "again", corpora)
    for one in (run, again):
        one.recipe["deterministic"] = True
        assert one.train_here() == 0
    assert again.losses() == run.losses()
    assert_same_tensors(run.newest_checkpoint, again.newest_checkpoint)
    assert not torch.are_deterministic_algorithms_enabled(), "left as it was"


def test_the_number_of_threads_is_part_of_the_promise(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Two threads add a sum in two parts."""
    before = torch.get_num_threads()
    try:
        for step, threads, warned in ((1, 1, 0), (2, 1, 0), (3, 2, 1)):
            torch.set_num_threads(threads)
            assert run.train_here("--stop-at-step", str(step)) == 0
            assert caplog.text.count("threads of the CPU, but 1 when") == warned
        run.recipe["deterministic"] = True
        assert run.train_here("--stop-at-step", "4") == 0
        assert "1 threads of the CPU, but 2 when" in caplog.text, "pinned"
        assert read_meta(run.newest_checkpoint)["threads"] == 1
        assert torch.get_num_threads() == 2, "left as it was"
    finally:
        torch.set_num_threads(before)


def test_a_kernel_that_is_not_reproducible_is_refused(run: Run) -> None:
    run.recipe |= {"deterministic": True, "attention": {"full_layers": [1], "full": {"backend": "cudnn"}}}
    with pytest.raises(ConfigError, match=r"attention.full.backend: given 'cudnn' in layers 0-1, .*auto or flash"):
        check(load_config(run.write_recipe()))


@pytest.mark.gpu
def test_dense_attention_gives_the_same_gradients_again(device: torch.device) -> None:
    """At a length where the fastest kernel does not."""
    layout = packed_layout([16384], device)
    attention = FullAttention(FullAttention.Options(), 128)
    q, k, v, dout = (
        torch.randn(16384, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2, 8)
    )
    with deterministic(True):
        grads = []
        for _ in range(5):
            out, _ = LOCAL_ENGINE(q, k, v, attention, layout)
            grads.append(torch.autograd.grad(out, (q, k, v), dout))
    for other in grads[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads[0], other, strict=True))


@pytest.mark.gpu
def test_a_run_on_a_gpu_gives_the_same_bits_again(run: Run, corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    again = Run(tmp_path / "again", corpora)
    for one in (run, again):
        one.recipe["deterministic"] = True
        one.recipe["model"] |= {"hidden_size": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
        one.recipe["attention"]["moba"] = {"block_size": 64, "topk": 2, "backend": "triton"}
        one.recipe["stages"][1] |= {"seq_len": 512, "micro_batch_size": 1}
        code, output = one.train_on_gpu(1)
        assert code == 0, output
    assert_same_tensors(run.newest_checkpoint, again.newest_checkpoint)
