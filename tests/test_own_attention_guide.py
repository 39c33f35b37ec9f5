"""docs/tutorials/your-own-attention.md: its package is found by its entry point, trains beside MoBA and full attention,
is refused under context parallelism, and gives the same losses on two ranks once it allows them."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train import registry
from moba_train.attention.layout import packed_layout
from moba_train.config.load import load_config
from moba_train.train import main
from tests.commands import run_app
from tests.data_tools.prose import prose
from tests.guide import PROGRAMS, ROOT, blocks, commands, run, shown_lines
from tests.run.trainer_ranks import Ranks

GUIDE = ROOT / "docs" / "tutorials" / "your-own-attention.md"
SMALLER = [
    "model={vocab_size: 320, hidden_size: 32, intermediate_size: 64, layers: 2, heads: 4, kv_heads: 2}",
    "batch_tokens=1K",
    "micro_batch_size=1",
    "stages.0.seq_len=512",
    "stages.0.tokens=4K",
    "optim.schedule.warmup_tokens=0",
    "evaluation={every: 4, sequences: 2}",
    "telemetry={console: false, report: false, log_every: 1}",
]


def install(folder: Path) -> None:
    """Leave what pip would: the module, and metadata with the entry points of pyproject.toml."""
    project = tomllib.loads(blocks(GUIDE, "toml")[0])["project"]
    folder.mkdir()
    (folder / "strided_attention.py").write_text(blocks(GUIDE, "python")[0])
    metadata = folder / f"strided_attention-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
    ((group, found),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in found.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with text and the recipe; the package is installed in this process."""
    folder = tmp_path_factory.mktemp("strided")
    install(folder / "site")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "recipe.yaml").write_text(blocks(GUIDE, "yaml")[0])
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(prose(number, 3000))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder / "site")
        registry.ATTENTION_KINDS.__dict__.pop("_found", None)
        yield folder
    registry.ATTENTION_KINDS.__dict__.pop("_found", None)  # found again without the package
    registry.ATTENTION_KINDS._loaded.pop("strided", None)
    sys.modules.pop("strided_attention", None)


def train_with_package(site: str, *command: str) -> int:
    """`python -m moba_train.train`, in a process where the package is installed."""
    sys.path.insert(0, site)
    registry.ATTENTION_KINDS.__dict__.pop("_found", None)
    return main(list(command))


def losses(run_dir: str) -> list[float]:
    records = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["type"] == "metrics"]


def test_the_commands_train_it_beside_moba_and_full_attention() -> None:
    for words in (words for block in blocks(GUIDE, "bash") for words in commands(block) if words[0] != "pip"):
        if "parallel.cp=2" in words:
            continue
        small = SMALLER if words[1] in ("plan", "train") else ["--workers", "1"] if words[1] == "tokenize" else []
        overrides = [word for word in words if "=" in word]
        sizes = {"2048": "320", "0.05": "0.3"}
        run([sizes.get(word, word) for word in words if word not in overrides], *small, *overrides)
    assert [len(losses(f"runs/{kind}")) for kind in ("strided", "moba", "full")] == [4, 4, 4]
    assert losses("runs/strided") != losses("runs/moba") != losses("runs/full")
    assert Path("compare.html").stat().st_size > 1000


def test_context_parallelism_is_refused_as_shown_and_works_once_allowed(folder: Path) -> None:
    (plan,) = (words for block in blocks(GUIDE, "bash") for words in commands(block) if "parallel.cp=2" in words)
    refused = run_app(PROGRAMS[plan[0]], *plan[1:], code=2)
    (shown,) = (text for text in blocks(GUIDE, "text") if "not checked" in text)
    assert shown_lines(shown, refused.output) == []
    site = folder / "two-ranks"
    install(site)
    module = site / "strided_attention.py"
    allowed, removed = re.subn(r"        if context\.cp > 1:\n            yield .*\n", "", module.read_text())
    assert removed == 1
    module.write_text(allowed)
    processes = Ranks()  # of this test alone: the package stays in them
    try:
        command = [str(site), str(folder / "recipe.yaml"), *SMALLER, "run_dir=runs/both", "parallel.cp=2"]
        processes.work(train_with_package, command, 2)
    finally:
        processes.close()
    assert losses("runs/both") == pytest.approx(losses("runs/strided"), rel=1e-3)


def test_it_attends_to_what_the_page_says_and_counts_it() -> None:
    """Own block and every second block before it, at most three, in two documents."""
    kind_class = registry.ATTENTION_KINDS["strided"]
    kind = kind_class(kind_class.Options(block_size=4, stride=2, count=3), head_dim=8)
    lengths = [41, 7]
    first_blocks, pairs = [0, 11], 0.0
    expected = []
    for first, length in zip(first_blocks, lengths, strict=True):
        for position in range(length):
            own = position // 4
            earlier = [own - 2 * step for step in (3, 2, 1) if own - 2 * step >= 0]
            pairs += 4 * len(earlier) + position % 4 + 0.5
            expected.append([first + block for block in earlier] + [-1] * (3 - len(earlier)))
    assert kind.select(packed_layout(lengths)).tolist() == expected
    model = load_config(Path("recipe.yaml")).model
    assert kind.pairs(model, lengths) == pairs
