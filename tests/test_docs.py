"""The pages of the root, docs, benchmarks and experiments are true: links, commands and keys exist, tables hold the
numbers of the result files."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint_layouts, context_skew_plot, miniatures
from benchmarks.attention_rows import short
from moba_train.config.schema import RunConfig
from tests.attention import kernel_page
from tests.guide import ROOT, anchors, blocks, check_usage, commands, links, run
from tests.test_import_directions import ORDER

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
FOLDERS = (".", "docs/**", "benchmarks/**", "experiments")
DOCUMENTS = [page for name in FOLDERS for page in sorted(ROOT.glob(f"{name}/*.md"))]
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_stages_says_what_its_recipe_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = ROOT / "docs" / "how-to" / "stages.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "recipe.yaml").write_text(blocks(guide, "yaml")[0])
    plans = [words for words in commands(blocks(guide, "bash")[0]) if words[1] == "plan"]
    needs = [re.findall(r"stage long needs most, (\S+) GiB on each GPU", run(words)) for words in plans]
    text = " ".join(guide.read_text().split())
    told = re.findall(r"the stage `long` needs most memory, (\S+) GiB on each GPU, by the second (\S+) GiB", text)
    assert told == [tuple(gib for (gib,) in needs)]


def test_the_attention_alone_runs_as_shown() -> None:
    (code,) = blocks(ROOT / "docs" / "explanation" / "kernels.md", "python")
    q, k, v = (torch.randn(600, heads, 16) for heads in (4, 2, 2))
    names = {"q": q, "k": k, "v": v, "cu": torch.tensor([0, 100, 600], dtype=torch.int32)}
    exec(code, names)
    assert names["out"].shape == q.shape


def test_moba_in_ten_minutes_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "explanation" / "moba.md"
    (code,), (shown,) = blocks(page, "python"), blocks(page, "text")
    exec(code, {})
    assert capsys.readouterr().out == shown


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_architecture_has_every_folder_in_the_order_of_imports() -> None:
    told = re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert told == [name for name in ORDER if (ROOT / "moba_train" / name).is_dir()]


def source(path: str) -> Path:
    """A file or folder that docs/explanation/architecture.md names: of the repository, or of moba_train/."""
    inside = ROOT / "moba_train" / path
    return inside if inside.exists() else ROOT / path


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Functions, classes with their members (`Class.member`), and assigned names of a module or class."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_the_architectures_files_exist_and_define_what_it_says() -> None:
    """`path/file.py` (`function`, `Class.method`): the file defines both."""
    text = ARCHITECTURE.read_text()
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        assert source(path).exists(), path
    defined: set[str] = set()
    for path in sorted(set(re.findall(r"`([\w/]+\.py)`", text))):
        defined |= {f"{path} {name}" for name in definitions(ast.parse(source(path).read_text()).body)}
    named = re.findall(r"`([\w/]+\.py)`\s\(([^)]*)\)", text)
    pairs = [f"{path} {name}" for path, inside in named for name in re.findall(r"`([A-Za-z_][\w.]*)`", inside)]
    assert len(pairs) > 50
    assert [pair for pair in pairs if pair not in defined] == []
    anywhere = {pair.partition(" ")[2] for pair in defined}
    assert [name for name in re.findall(r"`([A-Z]\w+(?:\.\w+)*)`", text) if name not in anywhere] == []


@documents
def test_commands_exist(document: Path) -> None:
    """Programs with their commands and options, launchers, modules with their options."""
    for command in (words for block in blocks(document, "bash") for words in commands(block)):
        if command[0] in ("moba-train", "moba-data"):
            check_usage(command)
        for launcher in (word for word in command if word.startswith("launch/")):
            assert (ROOT / launcher).exists(), launcher
    for module, options in re.findall(
        r"-m ((?:benchmarks|experiments|moba_train|data_tools)[\w.]*)([^`\n#]*)", document.read_text()
    ):
        if module.endswith(".NAME"):  # any of them
            continue
        path = ROOT / module.replace(".", "/")
        source = (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py").read_text()
        if module.startswith(("benchmarks", "experiments")):
            for option in re.findall(r"--[\w-]+", options):
                assert f'"{option}"' in source, f"{module} {option}"


@cache
def schema() -> tuple[dict[str, Any], set[str]]:
    """The recipe's JSON schema, and the name of every key in it."""
    root = RunConfig.model_json_schema()
    return root, {"extends", *_keys(root)}


def _keys(node: Any) -> Iterator[str]:
    """Every name of a property at or below a node of a JSON schema."""
    if isinstance(node, dict):
        yield from node.get("properties", {})
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _keys(inner)


def is_key(path: str) -> bool:
    """Whether a recipe may have this key, `parallel.timeout` for instance; list indices and free mappings pass."""
    root, _ = schema()

    def found(node: dict[str, Any], names: list[str]) -> bool:
        if "$ref" in node:
            return found(root["$defs"][node["$ref"].rsplit("/", 1)[1]], names)
        if not names:
            return True
        inside = [*node.get("anyOf", []), *node.get("oneOf", []), *node.get("allOf", [])]
        if isinstance(node.get("items"), dict):
            inside.append(node["items"])
        if isinstance(node.get("additionalProperties"), dict) and found(node["additionalProperties"], names[1:]):
            return True
        properties = node.get("properties", {})
        return (names[0] in properties and found(properties[names[0]], names[1:])) or any(
            found(part, names) for part in inside
        )

    return found(root, [name for name in path.split(".") if not name.isdigit()])


@documents
def test_the_keys_that_it_names_exist(document: Path) -> None:
    root, names = schema()
    for project in blocks(document, "toml"):  # of a package that the page writes, with a section of its own
        entries = re.findall(r'^(\w+) = "\w+:\w+"$', project, re.MULTILINE)
        options = re.findall(r"^ +(\w+): \w+ = Field\(", "".join(blocks(document, "python")), re.MULTILINE)
        names = names.union(entries, options)
    for block in blocks(document, "yaml"):
        for key in re.findall(r"(?:^|[{,\-]) *([a-z]\w*):(?: |$)", re.sub("#.*", "", block), re.MULTILINE):
            assert key in names, key
    text = re.sub(r"\[i?\]", "", re.sub("```.*?```", "", document.read_text(), flags=re.DOTALL))
    for path in re.findall(r"`([a-z]\w+(?:\.\w+)+)(?:[:=][^`]*)?`", text):
        if path.split(".")[0] in root["properties"] and not path.endswith((".py", ".json", ".sh", ".html")):
            assert is_key(path), path


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]


def rows(document: str) -> set[tuple[str, ...]]:
    """The rows of a document's tables, emphasis taken off."""
    lines = (ROOT / document).read_text().splitlines()
    return {tuple(cell.strip(" *") for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")}


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def test_the_measured_speed_of_the_trainer_is_shown() -> None:
    found = results("training-1b-h200.json").values()
    columns = [[entry[name]["median"] for name in ("tokens_per_s_per_device", "mfu", "mfu_dense")] for entry in found]
    told = {row[1:] for row in rows("benchmarks/measured/training.md")}
    for speed, mfu, dense in columns:
        assert (f"{speed:,.0f}", percent(mfu, 1), percent(dense, 1)) in told


def test_training_says_how_far_machines_differ() -> None:
    row, found = "128K:moba-512-8:budget:cp4", []
    for place, file in enumerate(("128k-h200-x4", "h200-x4-again", "128k-fp8-h200-x4")):
        rows_of = results(f"training-8b-{file}.json")
        fp8 = f"{row}:fp8:parallel.cp_transport=allgather", f"{row}:parallel.cp_transport=allgather:fp8"
        for kind, names in enumerate(((f"{row}:parallel.cp_transport=allgather",), fp8)):
            found += [(kind, place, rows_of[name]["tokens_per_s_per_device"]) for name in names if name in rows_of]
    rates = [rate for _, _, rate in sorted(found, key=lambda one: one[:2])]
    assert max(rate["max"] / rate["min"] for rate in rates) < 1.0115
    medians = [f"{rate['median']:,.0f}" for rate in rates]
    text = " ".join((ROOT / "benchmarks/measured/training.md").read_text().split())
    told = re.sub(r" \(\[file\]\([^)]*\)\)", "", text)
    assert "commits: {}, {} and {}; in FP8 {} and {}.".format(*medians) in told


def test_context_parallelism_has_its_measured_times() -> None:
    measured: dict[tuple[str, ...], dict[str, str]] = {}
    for part in ("", "-1m", "-dense", "-1m-dense", "-1m-dense-ulysses"):
        for entry in results(f"context-parallel{part}-h200.json"):
            key = entry["attention"], short(entry["tokens"]), entry["layout"]
            cell = f"{entry['ms']['median']:.1f} ({percent(entry['efficiency'])})"
            measured.setdefault(key, {})[entry["transport"]] = cell
    told = rows("benchmarks/measured/context-parallelism.md")
    assert len(measured) == 13
    for row, cells in measured.items():
        assert (
            *row,
            *(cells.get(name, "not run") for name in ("allgather", "ring", "ulysses", "hierarchical")),
        ) in told


def test_context_parallelism_has_what_a_sink_costs() -> None:
    files = {"context-skew-h200.json": "", "context-skew-zigzag-h200.json": "", "context-skew-h100.json": ", H100"}
    entries = [(entry, gpu) for file, gpu in files.items() for entry in results(file)]
    measured = {
        (
            entry["transport"],
            entry["layout"] + gpu,
            *(f"{entry[routing]['ms']['median']:.1f}" for routing in ("sink", "uniform")),
            f"{entry['sink_over_uniform']:.2f}",
            *(f"{entry[routing]['busy_max_over_mean']:.2f}" for routing in ("sink", "uniform")),
        )
        for entry, gpu in entries
    }
    transports = {entry["transport"] for entry, _ in entries}
    told = {row for row in rows("benchmarks/measured/context-parallelism.md") if row[0] in transports}
    assert told == measured


def test_mechanisms_has_what_a_sink_costs_under_dispatch() -> None:
    told = rows("benchmarks/measured/attention-kinds.md")
    for line in context_skew_plot.table(results("context-skew-h200-x2.json")).splitlines():
        assert tuple(cell.strip() for cell in line.strip("|").split("|")) in told


def test_durability_has_the_table_of_layouts() -> None:
    table = checkpoint_layouts.table(results("checkpoint-layouts-8b-h200-x4.json"))
    assert table in (ROOT / "benchmarks" / "measured" / "durability.md").read_text()


def test_durability_has_the_measured_stall() -> None:
    found = results("checkpoint-stall-8b-h200-x4.json")
    step, beside, after = found["step_s"], found["step_beside_save_s"], found["step_after_save_s"]["median"]
    text = " ".join((ROOT / "benchmarks" / "measured" / "durability.md").read_text().split())
    for claim in (
        f"for {1000 * found['first_stall_s']:.0f} ms, {percent(found['first_stall_share_of_step'], 1)} of a step of "
        f"{step['median']:.2f} s. The step after it takes {after:.2f} s",
        f"other steps take between {step['min']:.2f} and {step['max']:.2f} s",
        f"during the writing take {beside['median']:.2f} s, the slowest {beside['max']:.2f} s (",
    ):
        assert claim in text, claim


def test_the_extended_model_has_its_measured_losses() -> None:
    told = {row[0]: row[1:] for row in rows("benchmarks/measured/extension.md")}
    names = {"as trained": "the model as it was published", "full": "RoPE raised, full attention"}
    names["MoBA"] = "RoPE raised, MoBA 512/8 but in the last three layers"
    measured = results("smollm2-32k-h200.json")
    last = max(entry["tokens"] for entry in measured)
    for entry in measured:
        if entry["tokens"] in (0, 4_194_304, last):
            column = (0, 4_194_304, last).index(entry["tokens"])
            assert told[names[entry["attention"]]][column] == f"{entry['mean'][-1]:.2f}"


def test_recipes_has_what_the_miniatures_came_to() -> None:
    told = rows("benchmarks/measured/recipes.md")
    for line in miniatures.table(results("miniatures-h200.json")).splitlines():
        assert tuple(cell.strip() for cell in line.strip("|").split("|")) in told


def test_run_health_has_the_measured_cost_of_determinism() -> None:
    told = {row[1:] for row in rows("benchmarks/measured/health.md") if len(row) == 3}
    runs = [results("determinism-h200.json")["runs"][name] for name in ("as it is", "deterministic")]
    assert tuple(f"{run['tokens_per_s']['median']:,.0f}" for run in runs) in told
    assert tuple(f"{run['tensors_that_differ']} of {run['tensors']}" for run in runs) in told


def test_durability_has_the_counts_of_the_chaos_test() -> None:
    found = results("chaos.json")
    text = (ROOT / "benchmarks" / "measured" / "durability.md").read_text()
    cells = [cell for row in rows("benchmarks/measured/durability.md") if len(row) == 5 for cell in row]
    counts = [int(cell) for cell in cells if cell.isdigit()]
    assert sorted(counts) == sorted([*found["disturbances"].values(), len(found["failures"])])
    moments = found["moments_of_kills"]
    assert (
        f"Of the {found['kills']} kills, {moments['in a save']} fell into a save, {moments['starting']} before" in text
    )
    assert f"{found['ended_bitwise_equal']} of {found['runs']} runs ended bitwise equal" in " ".join(text.split())


def test_data_has_the_measured_packing_and_speed() -> None:
    told = rows("benchmarks/measured/data.md")
    for entry in results("packing.json"):
        padding = percent(entry["best_fit_padding"], 2)
        assert (f"{entry['seq_len']:,}", percent(entry["concat_cuts"], 1), "0", padding) in told
    speeds = {row[1].split("** ")[0].split(" (")[0].strip("*"): row[2:4] for row in told if len(row) == 5}
    for tokenizer in results("tokenize-cpu.json").values():
        for name, engine in tokenizer.get("engines", {}).items():
            assert name in speeds, name
            if name not in ("fastokens", "kitoken"):
                assert speeds[name][0] == f"{engine['first']['median']:.2f}", name


def test_run_health_has_the_measured_alarms() -> None:
    told = {row[-1] for row in rows("benchmarks/measured/health.md")}
    for curve in results("spike-alarms.json").values():
        seen = [round(100 * curve["detected_by_sigma"]["grad_norm"][sigma]) for sigma in ("6", "8", "10")]
        assert f"{' / '.join(map(str, seen))} %" in told


def test_kernels_has_the_measured_crossover() -> None:
    told = rows("benchmarks/measured/attention.md")
    measured = {
        (entry["setting"], str(entry["blocks"])): (
            entry["moba_ms"]["median"],
            min(dense["median"] for dense in entry["dense_ms"].values() if "median" in dense),
        )
        for entry in results("crossover-h200.json")
    }
    found = [row for row in told if len(row) == 4 and (row[0].split(", ")[-1], row[1]) in measured]
    assert len(found) == 10
    for setting, count, ours, dense in found:
        times = measured[setting.split(", ")[-1], count]
        assert [float(ours), float(dense.split(":")[0])] == pytest.approx(times, rel=0.01)


def test_the_kernels_page_shows_the_table_of_kernels() -> None:
    """After a change: python -m tests.attention.kernel_page, between the marks of that page."""
    marks = r"<!-- python -m tests\.attention\.kernel_page -->\n\n(.*?)\n<!-- end of kernel table -->"
    (shown,) = re.findall(marks, (ROOT / "docs" / "explanation" / "kernels.md").read_text(), re.S)
    assert shown == kernel_page.markdown()
