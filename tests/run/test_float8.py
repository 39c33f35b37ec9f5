"""Linear layers in FP8, rounded as on a GPU and multiplied on the CPU: training, layouts, resume, checkpoints."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.config.precision import PrecisionConfig
from moba_train.errors import ConfigError
from moba_train.model.build import build_model
from moba_train.model.transformer import Transformer
from moba_train.parallel import forward, fsdp
from moba_train.parallel.float8 import convert_linears, float8_problem, update_weight_scales
from tests.resolved import check, spec_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

pytest.importorskip("torchao")

FP8 = {"linear": "fp8", "compute": "bf16", "fp8": {"emulate": True}}


def prepared(run: Run, precision: dict[str, Any], **parallel: int) -> Run:
    run.recipe["precision"] = precision
    run.recipe["parallel"] = parallel
    run.recipe["checkpoint"] = {"every": 3, "keep_last": 10}
    for stage in run.recipe["stages"]:
        stage |= {"micro_batch_size": 2, "tokens": 4 * 512}
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """On two ranks, tensorwise. Not to be changed."""
    run = prepared(Run(tmp_path_factory.mktemp("float8"), corpora), FP8)
    ranks.train(run, 2)
    return run


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    run = prepared(Run(tmp_path_factory.mktemp("bf16"), corpora), {"compute": "bf16"})
    ranks.train(run, 2)
    return run


def test_it_learns_as_bf16_does_but_not_in_the_same_bits(finished: Run, in_bf16: Run) -> None:
    assert finished.losses() == pytest.approx(in_bf16.losses(), rel=0.01)
    assert finished.losses() != in_bf16.losses()


@pytest.mark.parametrize(
    ("ranks_", "parallel"), [(1, {}), (2, {"cp": 2}), (2, {"tp": 2}), (2, {"pp": 2})], ids=["1", "cp", "tp", "pp"]
)
def test_every_layout_trains_alike(
    finished: Run, run: Run, ranks: Ranks, ranks_: int, parallel: dict[str, int]
) -> None:
    ranks.train(prepared(run, FP8, **parallel), ranks_, "--stop-at-step", "3")
    assert run.losses() == pytest.approx(finished.losses()[:3], rel=2e-3)


def test_rowwise_scaling(in_bf16: Run, finished: Run, run: Run, ranks: Ranks) -> None:
    ranks.train(prepared(run, {**FP8, "fp8": {"emulate": True, "scaling": "rowwise"}}), 1)
    assert run.losses() == pytest.approx(in_bf16.losses(), rel=0.01)
    assert run.losses() != pytest.approx(finished.losses(), rel=1e-6)


def test_resuming_is_bitwise_and_the_checkpoint_is_that_of_any_run(finished: Run, run: Run, ranks: Ranks) -> None:
    """The weights' scales follow from the weights."""
    prepared(run, FP8).take_over(finished, 6)
    ranks.train(run, 2)
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)
    tensors = checkpoint_tensors(run.newest_checkpoint)
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model.")} == {torch.float32}


def test_a_run_goes_on_without_it(finished: Run, run: Run, ranks: Ranks, in_bf16: Run) -> None:
    prepared(run, {"compute": "bf16"}).take_over(finished, 3)
    ranks.train(run, 1)
    assert run.losses()[:3] == finished.losses()[:3]
    assert run.losses()[3:] != finished.losses()[3:]
    assert run.losses()[3:] == pytest.approx(in_bf16.losses()[3:], rel=0.01)


def test_every_use_of_the_model_has_the_scales_of_its_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in evaluations and after an optimizer step."""
    from moba_train.parallel import float8

    errors: list[float] = []

    def checked(model: torch.nn.Module) -> None:
        update_weight_scales(model)
        for parameter in model.parameters():
            if (weight := float8._wrapper(parameter)) is not None:
                exact = torch.finfo(torch.float8_e4m3fn).max / weight._tensor.abs().max().double()
                errors.append(abs(float(weight._precomputed_scale / exact) - 1))

    monkeypatch.setattr(forward, "update_weight_scales", checked)
    assert prepared(run, FP8).train_here("--stop-at-step", "3") == 0
    assert len(errors) >= 3 * 14
    assert max(errors) < 1e-6


def test_weights_are_cast_once_a_step_and_give_the_bits_of_a_cast_for_each_gather(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches, each with a forward and a backward pass."""
    from moba_train.parallel import float8_weights

    plain, casts = float8_weights.Float8Weight.fsdp_pre_all_gather, [0]

    def counted(self: Any, mesh: Any) -> Any:
        casts[0] += 1
        return plain(self, mesh)

    monkeypatch.setattr(float8_weights.Float8Weight, "fsdp_pre_all_gather", counted)
    never = {f"stages.{stage}.evaluate": "false" for stage in range(len(run.recipe["stages"]))}
    overrides = [f"{key}={value}" for key, value in never.items()]
    assert prepared(run, FP8).train_here("--stop-at-step", "3", *overrides) == 0
    assert casts == [3 * 14]
    losses = run.losses()

    def anew(self: Any, mesh: Any) -> Any:
        return plain(self, mesh)

    monkeypatch.setattr(float8_weights.CastOnce, "fsdp_pre_all_gather", anew)
    shutil.rmtree(run.run_dir)
    assert run.train_here("--stop-at-step", "3", *overrides) == 0
    assert run.losses() == losses


def test_which_layers_are_converted(run: Run) -> None:
    exclude = ["blocks.0.*", "*.down_proj"]
    prepared(run, {**FP8, "fp8": {"emulate": True, "exclude": exclude}})
    config = load_config(run.write_recipe())
    with torch.device("meta"):
        model = build_model(spec_of(config))
    names = [name for name, _ in model.named_parameters()]
    converted = convert_linears(model, config.precision)
    projections = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"]
    assert converted == [
        f"blocks.1.{name}" for name in [*projections, "feed_forward.gate_proj", "feed_forward.up_proj"]
    ]
    assert [name for name, _ in model.named_parameters()] == names


def test_a_pattern_that_matches_no_layer_is_refused_with_the_names_that_can_be(run: Run) -> None:
    """The output projection is no layer of a block, and never in FP8."""
    exclude = ["blocks.1.*", "bogus", "blocks.7.*", "output"]
    config = load_config(prepared(run, {**FP8, "fp8": {"emulate": True, "exclude": exclude}}).write_recipe())
    with pytest.raises(ConfigError) as refused:
        check(config)
    for place, pattern in enumerate(exclude[1:], 1):
        assert f"precision.fp8.exclude[{place}]: given {pattern!r}, which matches no linear layer" in str(refused.value)
    assert str(refused.value).count("precision.fp8.exclude") == 3
    assert "blocks.N.LAYER, N from 0 to 1, LAYER one of attention.q_proj, attention.k_proj, " in str(refused.value)
    check(config, allow_idle=True)  # of a checkpoint that is there
    check(load_config(run.write_recipe(), ["precision.linear=auto"]))


def test_the_run_says_at_its_start_how_many_layers_are_in_fp8(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    exclude = ["blocks.0.*", "*.down_proj"]
    prepared(run, {**FP8, "fp8": {"emulate": True, "exclude": exclude}})
    assert run.train_here("--stop-at-step", "1") == 0
    expected = "fp8     6 of 14 linear layers of the blocks, by torchao, tensorwise, emulated\n"
    assert expected in capfd.readouterr().out


@pytest.mark.parametrize("precision", [{"compute": "bf16"}, FP8], ids=["bf16", "fp8"])
def test_compiled_blocks_in_fp8_have_no_kernel_of_two_reductions(
    precision: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would write transposed inputs byte by byte; in bf16 it saves a pass."""
    wrap, seen = fsdp.wrap_blocks, []

    def wrap_and_look(model: Transformer, _compiled: bool, *further: Any) -> None:
        seen.append(torch._inductor.config.triton.mix_order_reduction)
        wrap(model, False, *further)

    monkeypatch.setattr(fsdp, "wrap_blocks", wrap_and_look)
    with torch._inductor.config.patch({"triton.mix_order_reduction": True}):
        for compiled in (False, True):
            run.recipe |= {"run_dir": str(run.folder / f"compiled {compiled}"), "compile": compiled}
            assert prepared(run, precision).train_here("--stop-at-step", "1") == 0
    assert seen == [True, precision is not FP8]


def test_what_cannot_run_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(prepared(run, {"linear": "fp8"}).write_recipe())
    check(config, device=None)
    with pytest.raises(ConfigError, match=r"precision\.linear: given 'fp8', which cannot run: the run trains on cpu"):
        check(config, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "NVIDIA A100 has compute capability 8.0, at least 8.9 needed" in float8_problem(config.precision, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert float8_problem(config.precision, "cuda") == ""
    contradictory = load_config(prepared(run, {"linear": "bf16", "compute": "fp32"}).write_recipe())
    with pytest.raises(ConfigError, match=r"precision\.linear: given 'bf16' with precision\.compute: fp32"):
        check(contradictory)


def test_what_transformer_engine_cannot_do_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"linear": "fp8", "implementation": "transformer_engine"}
    config = load_config(prepared(run, engine).write_recipe())
    check(config, device=None)
    with pytest.raises(ConfigError, match=r"precision\.linear: given 'fp8', which cannot run: the run trains on cpu"):
        check(config, device="cpu")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert "transformer_engine.pytorch cannot be used: ModuleNotFoundError" in float8_problem(config.precision, "cuda")
    given = r"precision\.implementation: given 'transformer_engine' with "
    for change, expected in (
        (
            {"precision": {**engine, "fp8": {"scaling": "rowwise"}}},
            r"precision\.fp8\.scaling: rowwise; allowed: tensorw",
        ),
        ({"precision": {**engine, "fp8": {"emulate": True}}}, r"precision\.fp8\.emulate: true; allowed: false"),
        ({"parallel": {"tp": 2}}, r"parallel\.tp: 2; allowed: 1"),
        ({"compile": True}, r"compile: true; allowed: false, or implementation: torchao"),
    ):
        usual = dict(run.recipe)
        run.recipe.update(change)
        with pytest.raises(ConfigError, match=given + expected):
            check(load_config(run.write_recipe()))
        run.recipe = usual


@pytest.mark.gpu
def test_transformer_engine_trains_as_torchao_does(run: Run) -> None:
    """On a GPU, also over a resume; its checkpoint is that of any run."""
    engine = {"linear": "fp8", "implementation": "transformer_engine"}
    if (reason := float8_problem(PrecisionConfig(**engine), "cuda")) != "":
        pytest.skip(reason)
    assert prepared(run, engine).train_here("--stop-at-step", "5") == 0
    assert run.train_here() == 0
    other = Run(run.folder / "torchao", run.folder)
    other.folder.mkdir()
    other.recipe = {**run.recipe, "run_dir": str(other.run_dir), "precision": {"linear": "fp8"}}
    assert other.train_here() == 0
    assert run.losses() == pytest.approx(other.losses(), rel=0.01)
    names, expected = (set(checkpoint_tensors(one.newest_checkpoint)) for one in (run, other))
    assert names == expected


def casts_like_torchao(in_one_pass: bool, dtype: torch.dtype, device: str) -> bool:
    """Whether bits are the same for numbers of every size, beyond both ends, between two numbers of FP8, and zero."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    from moba_train.parallel.float8_weights import cast, compile_cast

    sizes = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(70_001).remainder(40)
    halves = torch.arange(-500, 500) / 16
    numbers = torch.cat([sizes * 2**-20, sizes, halves, torch.tensor([0.0, -0.0, 448.0, 464.0, 1e30])]).to(device)
    scale = torch.tensor(0.7, device=device)
    ours = (compile_cast() if in_one_pass else cast)(numbers, scale, dtype)
    theirs = hp_tensor_and_scale_to_float8(numbers, scale, dtype)._data
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_are_cast_as_torchao_does(dtype: torch.dtype) -> None:
    assert casts_like_torchao(False, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_gpu_casts_weights_in_one_pass_to_the_same_bits(dtype: torch.dtype) -> None:
    assert casts_like_torchao(True, dtype, "cuda")


@pytest.mark.gpu
def test_compiled_blocks_on_a_gpu(run: Run) -> None:
    """Tensorwise, in hardware, against the emulation on this machine; 96 tokens are no power of two."""
    run.recipe["compile"] = True
    assert prepared(run, {"linear": "fp8"}).train_here() == 0
    compiled = run.losses()
    other = Run(run.folder / "emulated", run.folder)
    other.folder.mkdir()
    other.recipe = {**run.recipe, "run_dir": str(other.run_dir), "precision": FP8, "compile": False}
    assert other.train_here() == 0
    assert compiled == pytest.approx(other.losses(), rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scaling", "implementation"),
    [("tensorwise", "torchao"), ("rowwise", "torchao"), ("tensorwise", "transformer_engine")],
)
def test_a_gpu_computes_what_the_emulation_says(scaling: str, implementation: str) -> None:
    """Outputs and gradients of one converted model, in hardware and emulated, against bf16's distance from float32."""
    from moba_train.attention.full.full_kind import FullKind
    from moba_train.attention.layout import packed_layout
    from moba_train.config.model import ModelConfig
    from moba_train.model.build import initialize_weights
    from moba_train.model.transformer import Transformer

    if (reason := float8_problem(PrecisionConfig(linear="fp8", implementation=implementation), "cuda")) != "":
        pytest.skip(reason)
    shape = ModelConfig(vocab_size=256, hidden_size=256, intermediate_size=512, layers=2, heads=4, kv_heads=2)
    tokens = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(0)).cuda()

    def gradients(dtype: torch.dtype, fp8: dict[str, Any] | None) -> torch.Tensor:
        model = Transformer(shape).cuda()
        initialize_weights(model, seed=0)
        if fp8 is not None:
            by = "torchao" if fp8.get("emulate") else implementation
            convert_linears(model, PrecisionConfig(linear="fp8", implementation=by, fp8={"scaling": scaling, **fp8}))
        model = model.to(dtype)
        kind = FullKind(FullKind.Options(backend="reference"), shape.head_width)
        model.set_attention([kind] * 2)
        logits = model(tokens, torch.arange(200, device="cuda"), packed_layout([200], "cuda"))
        loss = torch.nn.functional.cross_entropy(logits.float(), tokens.roll(-1))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([grad.float().flatten() for grad in grads])

    exact = gradients(torch.float32, None)
    real, emulated = gradients(torch.bfloat16, {}), gradients(torch.bfloat16, {"emulate": True})
    # 200 tokens are no multiple of 16.
    # Rounding to FP8 is off by 8 to 9 % here; sums in another order push single numbers over a rounding edge.
    error = (emulated - exact).norm()
    assert 0.06 * exact.norm() < error < 0.12 * exact.norm()
    assert (real - emulated).norm() < 0.75 * error
    assert (real - exact).norm() < 1.25 * error
