"""`moba-train profile-spans`: influences of a whole model, the command, and training with what it wrote."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from typer.testing import CliRunner

from moba_train.attention.engine import LOCAL_ENGINE, OperatorEngine
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import Layout, packed_layout
from moba_train.config.attention import LayerAttention
from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError, UserError
from moba_train.foreign_files import ROOTS
from moba_train.mechanisms.capped import CappedKind
from moba_train.model.build import build_attention, initialize_weights, observed_layers
from moba_train.model.transformer import Transformer
from moba_train.tools.cli import app
from moba_train.tools.profile_spans import InfluenceObserver, ProfileOptions, profile_spans
from moba_train.tools.saved_recipe import open_checkpoint
from moba_train.train import main
from tests.commands import run_app
from tests.resolved import check, stages_of
from tests.tools.test_eval_command import write_corpus

RECIPE = """
name: test
run_dir: runs/test
model: {vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 4, kv_heads: 2}
data: {train: [{path: corpus}], validation: [{path: corpus}]}
attention: {default: full}
batch_tokens: 64
stages: [{name: short, seq_len: 64, tokens: 128}]
telemetry: {console: false, report: false, wandb: {mode: disabled}}
"""


def test_an_influence_is_the_derivative_of_the_loss_towards_the_masked_attention() -> None:
    """The loss of a two-layer model with one row of one head's output moved towards what it is with one key masked."""
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2}
    model = Transformer(ModelConfig.model_validate({**shape, "init_std": 0.3})).double()
    initialize_weights(model, 0)
    model.set_attention(build_attention([LayerAttention("full", FullAttention.Options())] * 2, 8))
    tokens, labels = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0))
    rows, layout = torch.arange(13), packed_layout([13])
    seen: dict[int, Any] = {}

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens, rows, layout), labels)  # in float64, as Transformer.loss is not

    observers = [InfluenceObserver(partial(seen.__setitem__, layer), 1) for layer in range(model.config.layers)]
    with observed_layers(model, LOCAL_ENGINE, observers):
        loss().backward()
    assert sorted(seen) == [0, 1]

    class Moved(OperatorEngine):
        def __init__(self, *place: Any) -> None:
            self.moved: Any = partial(moved, *place)

        def __call__(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Any, layout: Layout, *sink: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = super().__call__(q, k, v, attention, layout, *sink)
            return self.moved(q, k, v, attention, out), lse

    def moved(
        layer: int,
        head: int,
        query: int,
        key: int,
        share: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        scores = attention.scale * k[: query + 1, head // 2] @ q[query, head]
        scores[key] = -torch.inf
        masked = scores.softmax(0) @ v[: query + 1, head // 2] if query else torch.zeros(8, dtype=torch.float64)
        step = torch.zeros_like(out)
        step[query, head] = share * (masked - out[query, head])
        return out + step

    for place in [(0, 3, 12, 0), (0, 1, 5, 5), (0, 0, 0, 0), (1, 2, 9, 3), (1, 0, 12, 11)]:
        losses = []
        for share in (1e-4, -1e-4):
            engines = [LOCAL_ENGINE, LOCAL_ENGINE]
            engines[place[0]] = Moved(*place, share)
            model.set_engines(engines)
            losses.append(loss().item())
        layer, head, query, key = place
        assert seen[layer][head, query, key].item() == pytest.approx(
            (losses[0] - losses[1]) / 2e-4, rel=1e-6, abs=1e-10
        )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps."""
    folder = tmp_path_factory.mktemp("project")
    write_corpus(folder / "corpus", 0)
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["recipe.yaml"]) == 0
    return folder


@pytest.fixture(autouse=True)
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOTS, raising=False)
    monkeypatch.chdir(project)


def profile(output: Path | str, *options: str) -> tuple[int, str]:
    small = ["--block-size", "4", "--sink-tokens", "4", "--samples", "2"]
    result = CliRunner().invoke(app, ["profile-spans", "runs/test", "-o", str(output), *small, *options])
    return result.exit_code, result.output


def continued(tmp_path: Path, spans: Path, **changes: object) -> Path:
    """A recipe that goes on from the run with these spans."""
    recipe = {
        "extends": [str(Path.cwd() / "recipe.yaml"), str(spans)],
        "name": "sparse",
        "run_dir": str(tmp_path / "sparse"),
        "init_from": str(Path.cwd() / "runs/test"),
        "checkpoint": {"every": 1, "keep_last": 5},
        **changes,
    }
    path = tmp_path / "sparse.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_the_command_writes_spans_within_the_budget_that_a_run_trains_and_resumes_with(tmp_path: Path) -> None:
    spans = tmp_path / "spans.yaml"
    code, text = profile(spans, "--lengths", "32,64", "--budget", "0.6")
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "density", "32", "density", "64", "spans", "at", "64,", "sorted"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "all"]
    assert "written:" in lines[-1]
    recipe = continued(tmp_path, spans)
    config = load_config(recipe)
    check(config)
    (stage,) = stages_of(config)
    assert {layer.kind for layer in stage.attention} == {"moa"}
    assert len(stage.attention[0].options.model_dump()["alpha"]) == 4
    kinds = build_attention(stage.attention, 8)
    for at, length in enumerate((32, 64)):
        density = sum(kind.pairs(config.model, [length]) for kind in kinds) / 2 / (length**2 / 2)
        assert density <= 0.6
        assert float(lines[3].split()[1 + at]) == pytest.approx(density, abs=5e-4)
    assert main([str(recipe), "--stop-at-step", "1"]) == 0
    assert main([str(recipe)]) == 0
    (tmp_path / "whole").mkdir()
    whole = continued(tmp_path / "whole", spans)
    assert main([str(whole)]) == 0
    runs = [tmp_path / "sparse", tmp_path / "whole" / "sparse"]
    result = run_app(app, "compare", *runs)
    text = spans.read_text().partition("attention:\n")[2]
    result = run_app(app, "eval", "runs/test", "--attention", "own", f"attention={text}")
    assert "moa " in result.output
    spans.unlink()  # a checkpoint has them in its own recipe
    result = run_app(app, "eval", runs[0], "--attention", "own")
    assert "moa" in result.output


def test_layers_that_kind_full_cannot_replace_are_refused(tmp_path: Path) -> None:
    """Their spans would be those of another model."""
    saved = open_checkpoint(Path("runs/test"))
    capped = LayerAttention("capped", CappedKind.Options())
    saved = saved._replace(stage=replace(saved.stage, attention=(saved.stage.attention[0], capped)))
    with pytest.raises(UserError, match="given layers of capped; allowed: those that kind full could replace"):
        profile_spans(saved, ProfileOptions(tmp_path / "spans.yaml"), print)


def test_spans_of_another_model_are_refused(tmp_path: Path) -> None:
    spans = tmp_path / "spans.yaml"
    assert profile(spans, "--lengths", "32,64")[0] == 0
    model = yaml.safe_load(RECIPE)["model"]
    with pytest.raises(
        ConfigError,
        match=r"1 problem.*\n.*alpha: given spans of 4 heads in layers 0-1, but the model has 2 query heads",
    ):
        check(load_config(continued(tmp_path, spans, model={**model, "heads": 2})))
    with pytest.raises(ConfigError, match=r"overrides: layer ids \[1\] do not exist; the model has layers 0 to 0"):
        check(load_config(continued(tmp_path, spans, model={**model, "layers": 1})))
    with pytest.raises(ConfigError, match=r"1 problem.*\n  - stages\[0\]\.parallel\.tp: given 2, .* in layers 0-1 has"):
        check(load_config(continued(tmp_path, spans, parallel={"tp": 2})))
    stages = [{"name": "long", "seq_len": 128, "tokens": 128}]
    with pytest.raises(ConfigError, match=r"max_length: given 64 in layer.*128 tokens; allowed: at least seq_len"):
        check(load_config(continued(tmp_path, spans, stages=stages, batch_tokens=128)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "0"], "--budget: given 0; allowed: above 0, at most 1"),
        (["--budget", "0.01", "--lengths", "16"], "--budget: given 0.01; allowed: at least"),
        (["--lengths", "4,16"], "--lengths: given 4; allowed: above --block-size 4"),
        (["--lengths", "16,500"], "--lengths: given 500, but no document of the held-out text is longer"),
        (["--lengths", "many"], "given 'many'"),
        (["--max-length", "16"], "--max-length: given 16; allowed: at least 64, the longest length"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_what_it_refuses(options: list[str], message: str, tmp_path: Path) -> None:
    code, text = profile(tmp_path / "spans.yaml", *options)
    assert code == 2, text
    assert message in " ".join(text.split())
    assert not list(tmp_path.iterdir())


def test_it_never_overwrites(tmp_path: Path) -> None:
    spans = tmp_path / "spans.yaml"
    spans.write_text("mine")
    code, text = profile(spans)
    assert (code, spans.read_text()) == (2, "mine")
    assert "exists and is not overwritten" in " ".join(text.split())
    assert "does not exist" in profile(tmp_path / "nowhere" / "spans.yaml")[1]
