"""`moba-train plan --nodes`: the best layouts, the times that choose them, and what is said where there is none."""

import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from moba_train.config.load import load_config
from moba_train.config.mesh import MeshSizes, mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.errors import PlanError
from moba_train.memory.devices import H200, Device, Gpu, local_gpu
from moba_train.memory.flops import Documents
from moba_train.parallel.links import LINKS
from moba_train.resolve.run import resolve_unchecked, stage_layout
from moba_train.tools.cli import app
from moba_train.tools.plan import step_time
from moba_train.tools.plan.layouts import Layout, best_layouts
from moba_train.tools.plan.step_time import Machine, StageStep, attention_times, make_machine, predict_step
from tests.resolved import check, stages_of
from tests.small_recipe import Load

FOUR = make_machine(H200, 4, 400.0, None)
LARGE = ("model={vocab_size: 32000, hidden_size: 4096, intermediate_size: 14336, layers: 8, heads: 32, kv_heads: 8}",)


def documents(config: RunConfig) -> list[Documents]:
    return [Documents((stage.seq_len,), from_corpora=False) for stage in stages_of(config)]


def step(config: RunConfig, index: int, sizes: MeshSizes, machine: Machine = FOUR) -> StageStep:
    stage = stages_of(config)[index]
    parallel = stage.parallel.model_copy(update=sizes._asdict())
    run = resolve_unchecked(config.model_copy(update={"parallel": parallel}))
    attention = attention_times(config.model, stage, documents(config)[index], machine)
    laid_out = replace(stage, parallel=parallel)
    device = Device(machine.gpu, host_memory=None, is_here=False)
    layout = stage_layout(run.setup, run.memory, laid_out, sizes, machine.ranks_per_node, device)
    return predict_step(run.setup, run.memory.optimizer, laid_out, layout, attention, machine)


def test_full_attention_takes_the_time_of_the_kernel_that_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without flash-attn-4 cuDNN's, or FlashAttention-2's where documents differ in length; of another machine, and by
    rates measured here, those of `auto`."""
    sizes = {"vocab_size": 2, "hidden_size": 64, "intermediate_size": 1, "layers": 1, "heads": 1, "kv_heads": 1}
    stage = {"name": "only", "seq_len": "64K", "tokens": "1M"}
    recipe = {
        "name": "a",
        "run_dir": "a",
        "model": sizes,
        "attention": {"default": "full"},
        "data": {"train": [{"path": "a"}]},
    }
    config = RunConfig.model_validate(recipe | {"batch_tokens": "64K", "stages": [stage]})
    (only,) = stages_of(config)
    one, two = (Documents(lengths, from_corpora=False) for lengths in ((65536,), (65535, 1)))
    (rates := tmp_path / "rates.json").write_text(FOUR.rates.to_json())

    def seconds(own: Documents, is_here: bool, measured: Path | None = None) -> float:
        machine = make_machine(H200, 1, 400.0, measured, is_here)
        ((_, both),) = attention_times(config.model, only, own, machine).values()
        return both

    for reason, times in (("not installed", (140.4, 210.3)), ("", (123.0, 123.0))):
        monkeypatch.setattr(step_time, "varlen_problem", lambda *_, reason=reason: reason)
        for own, ms in zip((one, two), times, strict=True):
            assert seconds(own, is_here=True) / seconds(own, is_here=False) == pytest.approx(ms / 123.0, rel=1e-3)
        assert seconds(one, is_here=True, measured=rates) == seconds(one, is_here=False)
    monkeypatch.setattr(step_time, "varlen_problem", lambda *_: "not installed")
    config = config.model_copy(update={"model": config.model.model_copy(update={"head_dim": 96})})  # not among cuDNN's
    assert seconds(one, is_here=True) == pytest.approx(seconds(two, is_here=True), rel=1e-3)


@pytest.fixture
def search(recipe: Path) -> Callable[..., list[Layout]]:
    """The best layouts of the small recipe with overrides, each checked as `launch` would."""

    def search(*overrides: str, nodes: int = 2, machine: Machine = FOUR, most: int = 100) -> list[Layout]:
        config = load_config(recipe, overrides)
        world = nodes * machine.ranks_per_node

        def accept(changes: Sequence[str]) -> None:
            changed = load_config(recipe, [*overrides, *changes])
            check(changed, world, ranks_per_node=machine.ranks_per_node)
            meshes.append([mesh_sizes(stage.parallel, world) for stage in stages_of(changed)])

        meshes: list[list[MeshSizes]] = []
        found = best_layouts(resolve_unchecked(config), nodes, machine, documents(config), accept, most)
        assert [[step.mesh for step in layout.stages] for layout in found.best] == meshes
        return list(found.best)

    return search


def test_the_best_layout_is_the_fastest_of_all_that_are_valid(
    search: Callable[..., list[Layout]], recipe: Path
) -> None:
    """Every mesh of 8 ranks is tried here; `search` itself checks that each layout's arguments make its mesh."""
    found = search()
    assert [layout.seconds for layout in found] == sorted(layout.seconds for layout in found)
    assert len({layout.without_copies for layout in found}) == len(found) > 5
    config = load_config(recipe, ())
    for index, stage in enumerate(stages_of(config)):
        times = []
        for values in itertools.product((1, 2, 4, 8), repeat=5):
            sizes = MeshSizes(*values)
            changes = [f"parallel.{name}={size}" for name, size in sizes._asdict().items()]
            if sizes.ranks == 8:
                try:
                    check(load_config(recipe, changes), 8, ranks_per_node=4)
                except Exception:
                    continue
                times.append(step(config, index, sizes).time.seconds)
        assert min(layout.stages[index].time.seconds for layout in found) == pytest.approx(min(times)), stage.name


def test_an_overlap_is_left_out_of_layouts_that_cannot_have_it(search: Callable[..., list[Layout]]) -> None:
    found = search("parallel={tp: 2, tp_overlap: true}", "compile=true", "micro_batch_size=4")
    both = [layout for layout in found if any(step.mesh.cp > 1 and step.mesh.tp > 1 for step in layout.stages)]
    assert both
    assert all("parallel.tp_overlap=false" in layout.arguments for layout in both)


def test_only_what_fits_the_gpu_is_chosen(search: Callable[..., list[Layout]]) -> None:
    everything = search(*LARGE, nodes=1)
    least = min(layout.largest.memory for layout in everything)
    middle = Gpu("Middle", H200.tflops, 1.2 * least / 0.9)
    fitting = search(*LARGE, nodes=1, machine=FOUR._replace(gpu=middle))
    assert 0 < len(fitting) < len(everything)
    for layout in fitting:
        assert layout.largest.memory <= 0.9 * middle.memory
    small = Gpu("Small", H200.tflops, least / 2)
    with pytest.raises(
        PlanError, match=r"no layout of 4 GPUs fits Small, of which .* GiB are usable; the nearest needs "
    ):
        search(*LARGE, nodes=1, machine=FOUR._replace(gpu=small))


def test_gpus_that_no_layout_divides_are_refused_with_the_nearest(search: Callable[..., list[Layout]]) -> None:
    with pytest.raises(
        PlanError, match=r"given 3; no layout of 9 GPUs .*: stage 'long' has 8 sequences .*nearest: --nodes 2"
    ):
        search("parallel.tp=1", nodes=3, machine=FOUR._replace(ranks_per_node=3))


def test_more_nodes_than_there_are_are_refused_without_trying_each_number(search: Callable[..., list[Layout]]) -> None:
    with pytest.raises(PlanError, match=r"given 1000000000; no layout of 4000000000 GPUs .*nearest: --nodes 8192"):
        search(nodes=1_000_000_000)


def test_what_cannot_be_predicted_is_said(search: Callable[..., list[Layout]]) -> None:
    with pytest.raises(PlanError, match=r"precision.compute: given fp32, whose steps were never measured"):
        search("precision.compute=fp32")
    with pytest.raises(PlanError, match="attention kind 'infllm' has no measured time"):
        search("attention={default: infllm}", "stages.1.attention={}")
    for change, problem in (
        ({"update_s": {"muon": 1e-10}}, "optim.kind: given adamw, whose update was not measured"),
        ({"float8_products": None}, "precision.linear: given fp8, which was not measured"),
    ):
        unmeasured = FOUR._replace(rates=FOUR.rates.model_copy(update=change))
        with pytest.raises(PlanError, match=f"{problem}.*`moba-train calibrate"):
            search("precision={linear: fp8, fp8: {emulate: true}}", machine=unmeasured)


def test_the_parts_of_a_step_follow_the_layout(load: Load) -> None:
    config = load(*LARGE, "batch_tokens=512K")
    alone = step(config, 0, MeshSizes())
    assert alone.time.communication == 0
    assert (alone.received.node, alone.received.network) == (0, 0)
    eight = step(config, 0, MeshSizes(dp_shard=8))
    for part in ("products", "attention", "loss", "optimizer"):
        assert getattr(eight.time, part) == pytest.approx(getattr(alone.time, part) / 8)
    assert eight.tokens_per_second == pytest.approx(512 * 1024 / 8 / eight.time.seconds)
    assert eight.received.network > 0
    near = step(config, 0, MeshSizes(dp_shard=8), FOUR._replace(ranks_per_node=8))
    assert near.received.network == 0 < near.received.node
    tensor = step(config, 0, MeshSizes(dp_shard=4, tp=2))
    # 8 transfers a block of half of the rows of all micro-batches of the tp group, in bf16; in each of them half of the
    # output weight, and of its gradient.
    blocks = 8 * 8 * (512 * 1024 / 4) * 4096 * 2 / 2
    assert tensor.traffic["tp"].node == blocks + 512 * 1024 / 4 / 2048 * 2 * 32000 * 4096 * 2 / 2
    assert tensor.time.tp == pytest.approx(tensor.traffic["tp"].node / 300e9)


def test_a_pipeline_waits_for_its_bubble(load: Load) -> None:
    config = load(*LARGE, "model.vocab_size=64", "batch_tokens=128K", "attention={overrides: {}}")
    two = step(config, 0, MeshSizes(pp=2, dp_shard=4))
    count = 16
    passed_on = two.traffic["pp"].seconds(LINKS)
    assert two.traffic["pp"].network == 2 * count * 2048 * 4096 * 2
    parts = ("products", "attention", "loss", "repeated", "tp", "cp")
    layers = sum(getattr(two.time, part) for part in parts) + two.time.memory
    assert two.time.pp - passed_on == pytest.approx(layers / count, rel=0.1), "(pp - 1) / m of what is computed"


def test_a_pipeline_adds_up_the_gradients_of_whole_weights(load: Load) -> None:
    """Bytes that grow with the micro-batches are those of layers, and 10 a weight for each after the first. Weights are
    gathered once."""
    layout = ("model.vocab_size=64", "parallel.pp_layers=[4,4]")
    few, many = (
        step(load(*LARGE, *layout, f"batch_tokens={size}"), 0, MeshSizes(pp=2, dp_shard=4)) for size in ("64K", "128K")
    )
    weights = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    once = 2 * few.time.memory - many.time.memory
    assert once == pytest.approx((4 + 6 - 10 + 6 / 4) * weights / 4e12, rel=0.01)


def test_a_slow_network_costs_layouts_that_use_it(load: Load) -> None:
    config = load(*LARGE)
    slow = FOUR._replace(links=LINKS._replace(network=1e9))
    for sizes in (MeshSizes(dp_shard=8), MeshSizes(cp=8), MeshSizes(pp=2, dp_shard=4)):
        fast_s, slow_s = (step(config, 1, sizes, machine).time.seconds for machine in (FOUR, slow))
        assert slow_s > 1.2 * fast_s, sizes
    inside = MeshSizes(dp_replicate=2, dp_shard=4)
    for sizes in (inside, MeshSizes(dp_shard=8)):
        gathered = step(config, 1, sizes).traffic["fsdp"].network
        assert gathered > 0
    assert (
        step(config, 1, inside).traffic["fsdp"].network < step(config, 1, MeshSizes(dp_shard=8)).traffic["fsdp"].network
    )


def test_this_machines_gpu_has_the_bandwidth_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * 2**30, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _index: found)
    assert local_gpu() == Gpu("NVIDIA H100 80GB HBM3", 989, 79 * 2**30, 3.35e12, (9, 0))
    found.name, found.major, found.minor = "NVIDIA GeForce GTX 1080", 6, 1
    assert local_gpu() == Gpu("NVIDIA GeForce GTX 1080", None, 79 * 2**30, None, (6, 1))


def test_the_command_prints_five_layouts_whose_arguments_can_be_pasted(recipe: Path) -> None:
    def plan(*arguments: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", str(recipe), "--no-data", *arguments])

    done = plan("--nodes", "2", "--gpus-per-node", "4", "--network", "200", "--gpu", "h200")
    assert done.exit_code == 0, done.output
    assert "8 GPUs: 2 nodes of 4 H200; " in done.output
    for part in ("tokens/s/GPU", "from the network", "predictions", "200 Gbit/s a GPU", "matrix products"):
        assert part in done.output, part
    lines = re.findall(r"^  \d\. (.*?) +# ", done.output, re.MULTILINE)
    assert len(lines) == 5
    for arguments in lines[1:3]:
        again = plan("--gpus", "8", "--gpus-per-node", "4", *shlex.split(arguments))
        assert again.exit_code == 0, again.output
    (recipe.parent / "rates.json").write_text(FOUR.rates.to_json().replace('"H200"', '"Our GPU"'))
    own = plan("--nodes", "2", "--gpus-per-node", "4", "--rates", str(recipe.parent / "rates.json"))
    assert own.exit_code == 0, own.output
    assert "8 GPUs: 2 nodes of 4 Our GPU" in own.output
    assert re.findall(r"^  \d\. (.*?) +# ", own.output, re.MULTILINE)
    assert "rates of A100 (scaled from an H200's" in plan("--nodes", "1", "--gpu", "a100").output
    both = plan("--nodes", "2", "--gpus", "8")
    assert both.exit_code == 2
    assert "--nodes and --gpus: given both" in both.stderr


def test_fp8_saves_nothing_on_experts_whose_products_stay_in_bf16(load: Load) -> None:
    def saved(width: int) -> list[float]:
        moe = f"model.moe={{experts: 16, active: 4, intermediate_size: {width}}}"
        given = (load(*LARGE, moe, f"precision.linear={linear}") for linear in ("auto", "fp8"))
        own, float8 = (step(config, 1, MeshSizes()).time for config in given)
        return [getattr(own, part) - getattr(float8, part) for part in ("products", "memory")]

    narrow, wide = saved(256), saved(4096)
    assert narrow[0] > 0
    assert wide == pytest.approx(narrow)


def test_rows_of_experts_travel_more_often_where_layers_are_recomputed(load: Load) -> None:
    """As often as tests/mechanisms/test_exchange.py counts."""
    experts = ("model.moe={experts: 16, active: 4, intermediate_size: 256}", "parallel.ep=2")
    found = []
    for kept, compiled in (("none", True), ("full", True), ("full", False)):
        config = load(*LARGE, *experts, f"activation_checkpointing={kept}", f"compile={compiled}")
        found.append(step(config, 1, MeshSizes(dp_shard=2)))
    rows = found[0].stage.batch_tokens / 2 * 4 * 4096 * 2 / 2  # bf16, from the other rank
    assert [step.traffic["ep"].node / (8 * rows) for step in found] == [4, 5, 6]


def test_experts_are_divided_where_their_weights_outweigh_the_tokens(search: Callable[..., list[Layout]]) -> None:
    def best(active: int, tokens: str) -> str:
        moe = f"model.moe={{experts: 64, active: {active}, intermediate_size: 1024}}"
        return " ".join(search(*LARGE, moe, f"batch_tokens={tokens}", nodes=1)[0].arguments)

    assert "parallel.ep=4" in best(2, "32K")
    assert "ep=" not in best(32, "4M").replace("parallel.ep=1", "")
