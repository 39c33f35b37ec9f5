"""Members of another package: entry points alone make them known, and a recipe names them as it names ours."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from moba_train.errors import UserError
from moba_train.registry import ATTENTION_KINDS, EVALUATIONS, OPTIMIZERS, TELEMETRY_SINKS, TRANSPORTS, Registry
from moba_train.train import main
from tests.run.tiny_run import Run, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

REGISTRIES = ATTENTION_KINDS, EVALUATIONS, OPTIMIZERS, TRANSPORTS, TELEMETRY_SINKS
ENTRY_POINTS = """
[moba_train.attention_kinds]
scaled = guest.kind:ScaledKind

[moba_train.evaluations]
factors = guest.evaluation:Factors

[moba_train.optimizers]
sgd = guest.optimizer:SGD

[moba_train.telemetry_sinks]
lines = guest.sink:Lines

[moba_train.transports]
borrowed = guest.transport:BORROWED
"""

KIND = '''
"""Full attention times a factor for each head: a kind with one parameter."""

import torch
from torch import nn

from moba_train.attention.full.full_kind import FullKind, full_pairs
from moba_train.attention.kind import AttentionKind
from moba_train.config.base import Section


class Factors(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class ScaledKind(AttentionKind):
    name = "scaled"

    class Options(Section):
        """Options of `kind: scaled`."""

        first: float = 1.0

    def __init__(self, options, head_dim):
        super().__init__(options, head_dim)
        self.attentions = FullKind(FullKind.Options(), head_dim).attentions

    @classmethod
    def parameters(cls, options, model, layer):
        return Factors(model.heads)

    def mix(self, layer, parameters):
        out, auxiliary = super().mix(layer, parameters)
        return out * (self.options.first * parameters.weight)[:, None], auxiliary

    def pairs(self, model, lengths):
        return full_pairs(lengths)
'''

EVALUATION = '''
"""The mean factor of the heads."""

import torch

from moba_train.config.base import Section
from moba_train.evals.evaluation import Evaluation, EvaluationResult


class Factors(Evaluation):
    name = "factors"
    numbers = frozenset({"mean_factor"})

    class Options(Section):
        """The section `evaluation.factors`."""

        layer: int = 0

    def __init__(self, options, setting):
        self.layer = options.layer
        self.every = setting.every

    def run(self, context):
        (kind,) = context.model.attention_kinds()[:1]
        weight = context.model.blocks[self.layer].attention.get_submodule(kind.name).weight
        mean = weight.full_tensor().mean().item()
        return EvaluationResult({"mean_factor": mean}, f"mean factor {mean:.6f}", [])
'''

OPTIMIZER = '''
"""Plain gradient descent, which keeps no state."""

import torch

from moba_train.optim.spec import OptimizerSpec


def build(model, config, device, group):
    groups = [{"params": list(model.parameters()), "lr_factor": 1.0}]
    return torch.optim.SGD(groups, lr=config.lr, foreach=False)


SGD = OptimizerSpec(build, state={}, matrix_state={})
'''

SINK = '''
"""A line of text for each record."""

from pathlib import Path

from moba_train.config.base import Section


class Lines:
    class Options(Section):
        """The section `telemetry.lines`."""

        name: str

    def __init__(self, path):
        self.file = path.open("w")

    @classmethod
    def open(cls, setting, run):
        return cls(run.folder / setting.name)

    def write(self, record):
        print(record["type"], record["step"], file=self.file, flush=True)

    def close(self):
        self.file.close()
'''

TRANSPORT = '''
"""All-gather under another name."""

from moba_train.parallel.context.transport.allgather import AllGatherSpec


class BorrowedSpec(AllGatherSpec):
    name = "borrowed"


BORROWED = BorrowedSpec()
'''


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    """A folder with the package and its metadata, as pip leaves them."""
    root = tmp_path / "site"
    files = {"kind": KIND, "evaluation": EVALUATION, "optimizer": OPTIMIZER, "sink": SINK, "transport": TRANSPORT}
    for name, text in {"__init__": "", **files}.items():
        path = root / "guest" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    metadata = root / "guest-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return root


def train_with(site: str, recipe: str) -> int:
    """`python -m moba_train.train`, in a process where what lies in `site` is installed."""
    sys.path.insert(0, site)
    for registry in REGISTRIES:
        registry.__dict__.pop("_found", None)
    return main([recipe])


def test_a_package_brings_a_kind_an_evaluation_an_optimizer_a_sink_and_a_transport(run: Run, guest: Path) -> None:
    """Two ranks that share the sequences train two steps of a recipe that names them all."""
    run.recipe["attention"] = {"default": "scaled"}
    run.recipe["stages"] = [{"name": "only", "seq_len": 64, "tokens": 2 * 512, "micro_batch_size": 4}]
    run.recipe["optim"] = {"kind": "sgd", "lr": 0.1}
    run.recipe["evaluation"] = {"every": 1, "at_start": True, "sequences": 2, "factors": {"layer": 1}}
    run.recipe["telemetry"] = {"console": False, "report": False, "lines": {"name": "lines.txt"}}
    run.recipe["parallel"] = {"cp": 2, "cp_transport": "borrowed"}
    with closing(Ranks()) as ranks:  # not those of other tests, which would have the package from then on
        ranks.work(train_with, [str(guest), str(run.write_recipe())], 2)
    (chosen,) = run.records("parallel")
    assert "borrowed over 2 ranks" in chosen["message"]
    assert [record["step"] for record in run.records()] == [1, 2]
    first, *_, last = [record["mean_factor"] for record in run.records("factors")]
    assert first == 1.0
    trained = checkpoint_tensors(run.newest_checkpoint)["model.blocks.1.attention.scaled.weight"]
    assert last == pytest.approx(trained.mean().item())
    assert last != first
    lines = (run.run_dir / "lines.txt").read_text().splitlines()
    assert {"metrics 1", "metrics 2", "factors 2"} <= {*lines}


def test_without_the_package_the_recipe_is_refused_with_what_there_is(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["parallel"] = {"cp": 2, "cp_transport": "borrowed"}
    assert run.train_here() == 2
    refused = capsys.readouterr().err
    assert "parallel.cp_transport: given 'borrowed'" in refused
    assert "auto, allgather, ulysses, hierarchical, ring" in refused


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        # Kinds that are there have an option of this name, which holds no section.
        ({"local_blocks": {"size": 3}}, "attention.local_blocks: unknown key (no plug-in of that name is installed)"),
        ({"rope": {"theta": 3}}, "attention.rope: unknown key; a key of that name is at model.rope and stages[i].rope"),
        ({"mobba": {"topk": 3}}, "attention.mobba: unknown key (did you mean 'moba'?)"),
    ],
)
def test_sections_of_missing_packages_and_misplaced_ones_have_messages_of_their_own(
    attention: dict[str, Any], said: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["attention"] = attention
    assert run.train_here() == 2
    assert said in capsys.readouterr().err


BROKEN = """
[moba_train.attention_kinds]
crashes = broken.crash:Kind
empty = broken:Other
moba = broken:Other
renamed = broken:Named
earlier = broken:Earlier
[moba_train.evaluations]
crashes = broken.crash:Evaluation
[moba_train.optimizers]
empty = broken:Other
[moba_train.transports]
empty = broken:Other
[moba_train.telemetry_sinks]
gone = broken:Gone
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package is installed whose members cannot be used."""
    root = tmp_path / "site"
    (root / "broken").mkdir(parents=True)
    (root / "broken/__init__.py").write_text(
        "class Other:\n    pass\nclass Named:\n    name, Options, mix, pairs = 'named', None, None, None\n"
        "from moba_train.attention.full.full_kind import FullKind\n"
        "from moba_train.attention.kind import AttentionKind\n"
        "class Earlier(AttentionKind):\n    Options, costs = FullKind.Options, None\n"
    )
    (root / "broken/crash.py").write_text("raise OSError('no library')\n")
    (root / "broken-1.0.dist-info").mkdir()
    (root / "broken-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (root / "broken-1.0.dist-info/entry_points.txt").write_text(BROKEN)
    monkeypatch.syspath_prepend(root)
    for registry in REGISTRIES:
        registry.__dict__.pop("_found", None)
        monkeypatch.setattr(registry, "_loaded", {})
        monkeypatch.setattr(registry, "_same_name", {})
    yield
    for registry in REGISTRIES:  # found again, without the package, when the next test asks
        registry.__dict__.pop("_found", None)
    for module in [name for name in sys.modules if name.partition(".")[0] == "broken"]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("registry", "name", "said"),
    [
        (ATTENTION_KINDS, "crashes", r"attention kind 'crashes': broken\.crash:Kind cannot be imported: .*'broken'"),
        (ATTENTION_KINDS, "empty", r"broken:Other of the package 'broken' is none: it lacks Options, mix, pairs"),
        (ATTENTION_KINDS, "moba", r"moba_kind:MobaKind and broken:Other have one name; allowed: .*'broken'"),
        (ATTENTION_KINDS, "earlier", r"broken:Earlier of the package 'broken' is none: it lacks pairs"),
        (ATTENTION_KINDS, "renamed", r"has the name 'named'; allowed: that of its entry point"),
        (OPTIMIZERS, "empty", r"it lacks Options, build, state_bytes"),
        (TRANSPORTS, "empty", r"it lacks make, cost, check_sizes"),
        (TELEMETRY_SINKS, "gone", r"telemetry sink 'gone': broken:Gone cannot be imported"),
    ],
)
@pytest.mark.usefixtures("broken")
def test_a_member_that_cannot_be_used_is_refused_by_name(registry: Registry[Any], name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        registry[name]


@pytest.mark.usefixtures("broken")
def test_what_nobody_asked_for_stops_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error is explained, and a recipe trains, though another package's members cannot be imported."""
    run.recipe["attention"] = {"default": "full"}
    run.recipe["evaluation"] = {"every": 1, "sequences": 2, "position_wize": {}}
    assert run.train_here() == 2
    refused = capsys.readouterr().err
    assert "evaluation.position_wize: unknown key (did you mean 'position_wise'?)" in refused
    assert "broken" not in refused
    del run.recipe["evaluation"]["position_wize"]
    run.recipe["stages"] = [{"name": "only", "seq_len": 64, "tokens": 2 * 512, "micro_batch_size": 4}]
    assert run.train_here() == 0
