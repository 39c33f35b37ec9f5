"""LoRA and DoRA: what a layer computes and learns; runs that train adapters alone, resumed, on ranks, on another base;
exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from moba_train.attention.layout import packed_layout
from moba_train.config.load import load_config
from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.lora import CHANGE, A, B, Lora, LoraLinear, LoraOptions, merged
from moba_train.memory.weights import checkpoint_bytes
from moba_train.registry import ADAPTERS
from moba_train.resolve.recipe import resolve
from moba_train.tools.cli import app
from moba_train.tools.convert.adapters import export_adapters
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.plan.command import print_start_warnings
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.commands import run_app
from tests.memory.test_memory import config as of_model
from tests.memory.test_memory import planned
from tests.resolve.refusals import assert_refused
from tests.resolved import check, spec_of, stages_of, weights_of, work_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks
from tests.small_recipe import Load

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "use_dora": True, "modules_to_save": ["embedding", "*norm"]}


def layer(*, bias: bool = False, **options: Any) -> tuple[LoraLinear, LoraOptions, nn.Linear]:
    """A float64 layer whose adapters are not zero, and the layer without them."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 16, bias=bias, dtype=torch.float64)
    adapted = nn.Linear(24, 16, bias=bias, dtype=torch.float64)
    adapted.load_state_dict(plain.state_dict())
    found = LoraOptions(r=3, **options)
    LoraLinear.adapt(adapted, found)
    assert isinstance(adapted, LoraLinear)
    adapted.double()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.5) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 2)
    return adapted, found, plain


def adapters_of(linear: LoraLinear) -> dict[str, Tensor]:
    return {name: value for name, value in linear.state_dict().items() if "lora" in name}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_alpha": 5}, {"use_dora": True, "lora_alpha": 7}])
def test_a_layer_computes_with_the_weight_into_which_its_adapters_merge(options: dict[str, Any], bias: bool) -> None:
    adapted, found, plain = layer(bias=bias, **options)
    x = torch.randn(10, 24, dtype=torch.float64)
    weight = merged(plain.weight.detach(), adapters_of(adapted), found)
    torch.testing.assert_close(adapted(x), F.linear(x, weight, plain.bias), rtol=1e-12, atol=1e-12)
    adapted.adapts = False
    assert torch.equal(adapted(x), plain(x))


def test_rows_of_zeros_stay_zeros_with_dora() -> None:
    """As of the projections of blocks that were added to a model; B begins at zero."""
    adapted, found, _ = layer(use_dora=True)
    with torch.no_grad():
        adapted.weight[5] = adapted.lora_B.weight[5] = 0
    x = torch.randn(10, 24, dtype=torch.float64)
    y = adapted(x)
    torch.testing.assert_close(y, F.linear(x, merged(adapted.weight.detach(), adapters_of(adapted), found)))
    assert not y[:, 5].any()
    y.sum().backward()
    gradients = [value.grad for name, value in adapted.named_parameters() if "lora" in name]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_the_norm_of_dora_is_a_constant_of_the_backward_pass() -> None:
    """The gradients of section 4.3 of the paper, by autograd of its formula with the norm detached."""
    adapted, found, plain = layer(use_dora=True)
    x = torch.randn(10, 24, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(10, 16, dtype=torch.float64)
    (adapted(x) * seed).sum().backward()
    own = {name: parameter.grad for name, parameter in adapted.named_parameters() if "lora" in name}
    values = {name: value.clone().requires_grad_() for name, value in adapters_of(adapted).items()}
    weight = plain.weight.detach() + found.scaling * values[B] @ values[A]
    magnitude = plain.weight.detach().norm(dim=1) + values[CHANGE]
    weight = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True).detach()
    (F.linear(x.detach(), weight) * seed).sum().backward()
    for name, value in values.items():
        torch.testing.assert_close(own[name], value.grad, rtol=1e-10, atol=1e-12)


def test_dropout_is_of_the_adapters_inputs_and_of_training_alone() -> None:
    adapted, found, plain = layer(lora_dropout=0.5)
    x = torch.ones(4000, 24, dtype=torch.float64)
    with torch.no_grad():
        added = adapted(x) - plain(x)
        assert torch.equal(added, (adapted(x) - plain(x)))
    dropped = (adapted(x) - plain(x)).detach()
    assert not torch.allclose(dropped, added)
    deviation = found.scaling * (adapted.lora_B.weight @ adapted.lora_A.weight).norm(dim=1) / len(x) ** 0.5
    assert ((dropped.mean(0) - added[0]).abs() < 5 * deviation).all()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Path:
    """A model of the small recipe, with tied embeddings, in a Hugging Face folder."""
    run = Run(tmp_path_factory.mktemp("base"), corpora)
    run.recipe["model"] |= {"init_std": 0.3, "tie_embeddings": True}
    run.recipe["stages"] = run.recipe["stages"][:1]
    run.recipe["stages"][0]["tokens"] = 1024
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.folder)
        assert run.train_here() == 0
        export_to_hf(open_checkpoint(run.run_dir), run.folder / "hf", torch.float32, 1 << 30)
    return run.folder / "hf"


def adapting(run: Run, base: Path, **keys: Any) -> Run:
    run.recipe |= {"init_from": str(base), "adapters": {"lora": LORA}, "checkpoint": {"every": 2, "keep_last": 20}}
    run.recipe["model"]["tie_embeddings"] = True
    run.recipe["stages"][1].pop("rope")
    run.recipe |= keys
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path, base: Path, ranks: Ranks) -> Run:
    """Full attention, then MoBA, on two ranks with context parallelism, packed documents and dropout. Not to be
    changed."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), corpora)
    adapting(run, base, parallel={"cp": 2}, adapters={"lora": LORA | {"lora_dropout": 0.1}})
    run.recipe["evaluation"]["at_start"] = True
    ranks.train(run, 2)
    return run


def test_the_checkpoint_and_the_optimizer_have_the_adapters_alone(undisturbed: Run) -> None:
    tensors = checkpoint_tensors(undisturbed.newest_checkpoint)
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert {name for name in names if "lora_" not in name} == {
        "adapters_base", "embedding.weight", "norm.weight",
        *(f"blocks.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("attention_norm", "feed_forward_norm")),
    }  # fmt: skip
    assert len([name for name in names if name.endswith(CHANGE)]) == 14
    trained = {name.removeprefix("optim.").rpartition(".")[0] for name in tensors if name.startswith("optim.")}
    assert trained == names - {"adapters_base"}


def test_adapters_learn(undisturbed: Run) -> None:
    losses = [record["eval_loss"] for record in undisturbed.records("validation_loss")]
    assert losses[-1] < losses[0] - 0.1


def test_a_run_that_resumes_has_the_bits_of_one_that_was_never_stopped(
    run: Run, undisturbed: Run, ranks: Ranks
) -> None:
    run.recipe = undisturbed.recipe | {"run_dir": str(run.run_dir)}
    run.take_over(undisturbed, 8)
    ranks.train(run, 2)
    assert [event["step"] for event in run.records("resume")] == [8]
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


def test_recomputed_layers_drop_the_same_inputs(run: Run, tmp_path: Path, base: Path) -> None:
    adapting(run, base, adapters={"lora": LORA | {"lora_dropout": 0.5}})
    losses = []
    for kept in ("none", "full"):
        run.recipe |= {"run_dir": str(tmp_path / kept), "activation_checkpointing": kept}
        assert run.train_here("--stop-at-step", "4") == 0
        losses.append(run.losses())
    assert losses[0] == losses[1]


def test_ranks_change_nothing_but_rounding(run: Run, corpora: Path, tmp_path: Path, base: Path, ranks: Ranks) -> None:
    found = {}
    for count, parallel in ((1, {}), (4, {"cp": 2, "dp_shard": 2})):
        one = adapting(Run(tmp_path / str(count), corpora), base, parallel=parallel)
        one.folder.mkdir()
        one.recipe["optim"]["lr"] = 3e-3
        for stage in one.recipe["stages"]:
            stage["tokens"] = 3 * 512
        ranks.train(one, count)
        found[count] = one.losses(), checkpoint_tensors(one.newest_checkpoint)
    assert found[4][0] == pytest.approx(found[1][0], rel=1e-4)
    for name, value in found[1][1].items():
        if name.startswith("model."):
            torch.testing.assert_close(found[4][1][name], value, rtol=1e-2, atol=2e-3)


class KeptWide(Lora):
    """Adapters whose base stays in float32 whatever computes."""

    dtype = property(lambda self: torch.float32, lambda self, dtype: None)


def test_a_base_in_the_dtype_of_the_computation_changes_no_bit(
    run: Run, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapting(run, base, precision={"compute": "bf16"})
    begin = Lora.begin
    found = []
    saved = []

    def noted(self: Lora) -> None:
        begin(self)
        found.append(self.layers[0].weight.dtype)

    monkeypatch.setattr(Lora, "begin", noted)
    for folder, adapters in (("own", Lora), ("wide", KeptWide)):
        run.recipe["run_dir"] = str(tmp_path / folder)
        with ADAPTERS.registered("lora", adapters):
            assert run.train_here("--stop-at-step", "4") == 0
        saved.append(run.newest_checkpoint)
    assert found == [torch.bfloat16, torch.float32]
    assert_same_tensors(*saved)


def test_another_base_is_refused(
    run: Run, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapting(run, base)
    assert run.train_here("--stop-at-step", "2") == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] *= 1.0001
    save_file(weights, other / "model.safetensors")
    run.recipe["init_from"] = str(other)
    capsys.readouterr()
    assert run.train_here() != 0
    assert "init_from: holds other weights than those" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path.parent)
    saved = open_checkpoint(run.run_dir)
    saved = saved._replace(config=saved.config.model_copy(update={"init_from": str(other)}))
    with pytest.raises(CheckpointError, match="init_from: holds other weights than those"):
        export_adapters(saved, tmp_path / "peft")
    run.recipe["init_from"] = str(tmp_path / "absent")
    assert run.train_here() == 2
    assert "init_from: given" in capsys.readouterr().err


def test_each_start_reads_the_base_which_may_be_at_an_address(
    run: Run, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapting(run, base, init_from=f"file://{base}")
    for step in ("1", "2"):
        assert run.train_here("--stop-at-step", step) == 0
    print_start_warnings(resolve(load_config(run.write_recipe())))
    assert "will not be read" not in capsys.readouterr().out


def test_a_run_keeps_its_adapters_and_no_other_begins_with_them(
    run: Run, undisturbed: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    adapting(run, undisturbed.run_dir)
    assert run.train_here() != 0
    assert "holds adapters alone; merge them first: moba-train convert moba-to-hf" in capsys.readouterr().err
    run.recipe = undisturbed.recipe | {"run_dir": str(run.run_dir), "parallel": {}}
    run.take_over(undisturbed, 8)
    for adapters in ({"lora": LORA}, {}):  # without dropout; without adapters
        run.recipe["adapters"] = adapters
        assert run.train_here() != 0
        assert "adapters was lora r=4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exported(undisturbed: Run, base: Path) -> tuple[Path, Path, Tensor]:
    """The folder with merged weights, that for peft, and our logits of `TOKENS` with full attention."""
    merged_folder, peft_folder = undisturbed.folder / "merged", undisturbed.folder / "peft"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base.parents[1])  # the folder of corpora, base and run
        saved = open_checkpoint(
            undisturbed.run_dir / "checkpoints" / "step_00000006"
        )  # of the stage with full attention
        export_to_hf(saved, merged_folder, torch.float32, 1 << 30)
        export_adapters(saved, peft_folder)
        model = load_trained(saved, torch.device("cpu"))
    with torch.no_grad():
        logits = model(TOKENS, torch.arange(len(TOKENS)), packed_layout([len(TOKENS)]))
    return merged_folder, peft_folder, logits


TOKENS = torch.arange(40) * 7 % 64


def transformers_logits(folder: Path) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model, model(TOKENS[None]).logits[0]


def test_merged_weights_give_the_logits_of_the_adapters(exported: tuple[Path, Path, Tensor], base: Path) -> None:
    folder, _, logits = exported
    torch.testing.assert_close(transformers_logits(folder)[1], logits, rtol=1e-4, atol=1e-4)
    assert (transformers_logits(base)[1] - logits).abs().max() > 0.1, "the adapters do something"


def test_adapters_are_exported_when_their_base_has_moved(
    undisturbed: Run, exported: tuple[Path, Path, Tensor], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parents[1])
    checkpoint = shutil.copytree(undisturbed.run_dir / "checkpoints" / "step_00000006", tmp_path / "step_00000006")
    moved = tmp_path / "moved"
    base.rename(moved)
    try:
        refused = CliRunner().invoke(app, ["convert", "moba-to-peft", str(checkpoint), str(tmp_path / "none")])
        assert "convert: --init-from FOLDER" in refused.stderr
        for command, before in zip(("moba-to-hf", "moba-to-peft"), exported[:2], strict=True):
            options = ["--init-from", str(moved)] + (["--dtype", "float32"] if command == "moba-to-hf" else [])
            run_app(app, "convert", command, checkpoint, tmp_path / command, *options)
            (name,) = (path.name for path in before.glob("*.safetensors"))
            assert (tmp_path / command / name).read_bytes() == (before / name).read_bytes()
    finally:
        moved.rename(base)


def test_a_folder_for_peft_holds_the_factors_by_its_names(exported: tuple[Path, Path, Tensor], base: Path) -> None:
    """peft's own formula on the base, by the names of transformers' modules."""
    merged_folder, folder, logits = exported
    for one in (merged_folder, folder):
        assert ", to which it added adapters." in (one / "README.md").read_text()
    assert "not with the one above." in (folder / "README.md").read_text()
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {
        "peft_type": "LORA",
        "r": 4,
        "use_dora": True,
        "base_model_name_or_path": str(base),
    }.items() <= config.items()
    model, _ = transformers_logits(base)
    modules: dict[str, Any] = dict(model.named_modules())
    modules["lm_head"].weight = nn.Parameter(modules["lm_head"].weight.clone())  # as peft does to what it trains
    with torch.no_grad():
        for name in config["target_modules"]:
            a, b = (tensors.pop(f"base_model.model.{name}.{end}") for end in (A, B))
            weight = modules[name].weight
            sum_ = weight + config["lora_alpha"] / config["r"] * b @ a
            norms = tensors.pop(f"base_model.model.{name}.lora_magnitude_vector")
            weight.copy_(sum_ * (norms / sum_.norm(dim=1))[:, None])
        for name in config["modules_to_save"]:
            modules[name].weight.copy_(tensors.pop(f"base_model.model.{name}.weight"))
        found = model(TOKENS[None]).logits[0]
    assert not tensors
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_peft_itself_loads_the_folder(exported: tuple[Path, Path, Tensor], base: Path) -> None:
    peft = pytest.importorskip("peft")
    _, folder, logits = exported
    model = peft.PeftModel.from_pretrained(transformers_logits(base)[0], str(folder))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS[None]).logits[0], logits, rtol=1e-4, atol=1e-4)
    assert peft.get_peft_model_state_dict(model).keys() == load_file(folder / "adapter_model.safetensors").keys()


def test_the_teacher_base_computes_without_adapters(
    undisturbed: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parents[1])
    model = load_trained(open_checkpoint(undisturbed.run_dir / "checkpoints" / "step_00000006"), torch.device("cpu"))
    assert isinstance(model.adapters, Lora)
    inputs = TOKENS, torch.arange(len(TOKENS)), packed_layout([len(TOKENS)])
    with torch.no_grad(), model.adapters.off():
        without = model(*inputs)
    for layer in model.adapters.layers:
        for name, parameter in layer.named_parameters():
            if name in (B, CHANGE):
                parameter.data.zero_()
    torch.testing.assert_close(model(*inputs), without)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.tp=2"], "parallel.tp: given 2 with adapters.lora; allowed: 1"),
        (["parallel.pp=2"], "parallel.pp: given 2 with adapters.lora; allowed: 1"),
        (["precision.linear=fp8"], "precision.linear: given fp8 with adapters.lora; allowed: auto"),
        (
            ["adapters.lora.target_modules=[q_proj,k_porj]"],
            "adapters.lora.target_modules[1]: given 'k_porj', which matches none; allowed: names such as k_proj",
        ),
        (
            ["adapters.lora.modules_to_save=[embeding]"],
            "adapters.lora.modules_to_save[0]: given 'embeding', which matches none; allowed: names such as embedding",
        ),
        (["adapters.lora.target_modules=[]"], "adapters.lora.target_modules: given []"),
        (
            ["adapters.lora.modules_to_save=[o_proj]"],
            "adapters.lora.modules_to_save: names blocks.0.attention.o_proj, which target_modules gives adapters",
        ),
        (["stages.0.trainable=[embedding.weight]"], "stages[0].trainable[0]: given 'embedding.weight', which no"),
        (
            ["adapters=null", "stages.0.distill={teacher: base}"],
            "stages[0].distill.teacher: given 'base'; allowed with adapters",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused_by_its_key(load: Load, overrides: list[str], problem: str) -> None:
    adapters = [] if "adapters=null" in overrides else ["adapters.lora={r: 4}"]
    assert_refused(load(*adapters, *(one for one in overrides if one != "adapters=null")), problem)


def test_adapters_without_a_model_to_begin_with_are_refused(load: Load) -> None:
    config = load("adapters.lora={}")
    check(config)
    assert_refused(config, "init_from: given null; adapters.lora needs the model that it adapts", check_files=True)


def test_patterns_name_layers_by_their_end_or_by_all_of_their_name(load: Load) -> None:
    targets = ["v_proj", "blocks.[12].feed_forward.*"]
    spec = spec_of(load(f"adapters.lora={{r: 4, target_modules: {targets}}}"))
    hidden, inner, kv = 128, 384, 64
    assert spec.counts.adapters == 4 * (4 * (hidden + kv) + 2 * 3 * (hidden + inner))
    assert spec.counts.total - spec.counts.base == spec.counts.adapters


def test_a_plan_counts_gradients_and_states_of_adapters_alone(load: Load) -> None:
    """Weights of an 8B model stay, 16 GB in bf16; 64 GB of moments and 32 GB of gradients become those of 42M."""
    lora = {"adapters": {"lora": {"r": 16}}}
    all_of, adapted = (
        planned("llama3-8b", 1, "8K", {"default": "full"}, batch_tokens="8K", **keys) for keys in ({}, lora)
    )
    trained = spec_of(of_model("llama3-8b", "8K", {"default": "full"}, batch_tokens="8K", **lora)).counts.adapters
    assert trained == 41_943_040
    assert adapted.memory.optimizer == 8 * trained
    assert adapted.memory.gradients <= 4 * trained
    assert adapted.memory.parameters == all_of.memory.parameters / 2 + 4 * trained
    assert all_of.memory.total - adapted.memory.total > 75e9


def test_the_numbers_of_a_plan_are_those_of_the_checkpoint(undisturbed: Run) -> None:
    config = RunConfig.model_validate(undisturbed.recipe)
    stage = stages_of(config)[0]
    spec = spec_of(config)
    sizes = MeshSizes(dp_shard=1, cp=2)
    tensors = checkpoint_tensors(undisturbed.newest_checkpoint)
    weights = {
        name: value for name, value in tensors.items() if name.startswith("model.") and value.is_floating_point()
    }
    moments = [value for name, value in tensors.items() if ".exp_avg" in name]
    trained = sum(value.numel() for value in weights.values())
    assert spec.counts.total - spec.counts.base == trained
    found = weights_of(config, sizes, work_of(config, stage, sizes))
    assert found.trained.shard == -(-trained // 2)
    assert found.optimizer == pytest.approx(4 * sum(value.numel() for value in moments) / 2, rel=1e-3)
    assert checkpoint_bytes(spec, "adamw") == 4 * trained + 4 * sum(value.numel() for value in moments)


@pytest.mark.gpu
def test_adapters_learn_on_a_gpu_compiled_and_in_bf16_as_in_float32(run: Run, base: Path) -> None:
    found = {}
    for compute, compiled in (("bf16", True), ("fp32", False)):
        one = Run(run.folder / compute, Path(run.recipe["data"]["validation"][0]["path"]).parent)
        one.folder.mkdir()
        code, text = adapting(one, base, precision={"compute": compute}, compile=compiled).train_on_gpu()
        assert code == 0, text
        found[compute] = one.losses()
    assert found["bf16"] == pytest.approx(found["fp32"], rel=2e-2)


def test_biases_of_routers_that_stay_are_those_of_the_base(run: Run, corpora: Path, tmp_path: Path) -> None:
    """Experts in balance without a loss: adapters leave routers and their biases as they are, so peft needs none."""
    moe = {"experts": 4, "active": 2, "intermediate_size": 24, "router": {"balance": "bias"}}
    begun = Run(tmp_path / "begun", corpora)
    begun.folder.mkdir()
    begun.recipe["model"]["moe"] = run.recipe["model"]["moe"] = moe
    for one in (begun, run):
        one.recipe["stages"] = one.recipe["stages"][:1]
        one.recipe["stages"][0]["tokens"] = 1024
    assert begun.train_here() == 0
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    for saved, problem in (([], ""), (["*router"], "blocks.0.feed_forward.bias")):
        run.recipe |= {"init_from": str(begun.run_dir), "adapters": {"lora": lora | {"modules_to_save": saved}}}
        shutil.rmtree(run.run_dir, ignore_errors=True)
        assert run.train_here() == 0
        folder = tmp_path / f"peft{len(problem)}"
        if problem:
            with pytest.raises(CheckpointError, match=problem):
                export_adapters(open_checkpoint(run.run_dir), folder)
            continue
        export_adapters(open_checkpoint(run.run_dir), folder)
        assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 2 * 2
