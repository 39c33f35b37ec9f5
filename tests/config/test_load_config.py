"""Recipes: YAML, `extends`, overrides, and what users are told when something is wrong."""

import itertools
import os
import re
import shlex
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moba_train.config.attention import LayerAttention
from moba_train.config.load import (
    RECIPE_BYTES,
    apply_overrides,
    deep_merge,
    load_config,
    packaged_recipes,
    parse_yaml,
)
from moba_train.errors import ConfigError
from moba_train.registry import FEED_FORWARDS
from tests.resolved import check, stages_of
from tests.small_recipe import Load, Write

ROOT = Path(__file__).parents[2]
FUZZ = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=150)

keys = st.text(string.ascii_lowercase, min_size=1, max_size=3)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2000, 2000)
    | st.floats(allow_nan=False)
    | st.text(string.printable, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)


def problems(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return caught.value.problems


def test_numbers_are_read_as_people_write_them(load: Load) -> None:
    config = load("optim.lr=1e-4", "model.rope.theta=5e6", "stages.0.tokens=1.5B", "stages.0.seq_len=4K")
    assert config.optim.lr == 1e-4
    assert config.model.rope.theta == 5e6
    assert config.stages[0].tokens == 1_500_000_000
    assert config.stages[0].seq_len == 4096


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e6", 5e6), ("1E-4", 1e-4), ("-.5", -0.5), ("1_000", 1000), ("0", 0), (".inf", float("inf")), ("~", None)]
    + [(text, text) for text in ("no", "on", "12:30", "2024-01-01", "1e", "e5", "0x1f", "1.2.3")],
)
def test_plain_values_follow_yaml_1_2(text: str, value: float | str | None) -> None:
    assert parse_yaml(text, "test") == value
    assert type(parse_yaml(text, "test")) is type(value)


def test_duplicate_keys_are_refused_with_both_lines(write: Write) -> None:
    path = write("twice.yaml", "name: a\nmodel: {layers: 1, layers: 2}\nseed: 1\nname: b\n")
    found = problems(path)
    assert any("line 4" in text and "'name'" in text and "line 1" in text for text in found)
    assert any("line 2" in text and "'layers'" in text for text in found)


def test_syntax_errors_name_file_and_line(write: Write) -> None:
    (problem,) = problems(write("broken.yaml", "name: a\nstages: [\n"))
    assert "broken.yaml, line 3" in problem


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "3"])
def test_a_recipe_must_be_a_mapping(write: Write, text: str) -> None:
    (problem,) = problems(write("list.yaml", text))
    assert "allowed: a mapping" in problem


def test_missing_and_unreadable_files_are_config_errors(tmp_path: Path, write: Write) -> None:
    assert "nowhere.yaml: cannot be read" in problems(tmp_path / "nowhere.yaml")[0]
    assert "cannot be read" in problems(tmp_path)[0]
    assert "base.yaml (extended by" in problems(write("a.yaml", "extends: base.yaml"))[0]
    path = tmp_path / "latin1.yaml"
    path.write_bytes(b"name: \xe9")
    assert "cannot be read" in problems(path)[0]


def test_packaged_recipes_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert sorted(path.resolve() for path in packaged_recipes().values()) == files, "names are unique"
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "mini/continue-1m"):
        assert load_config(name, ["seed=3"]) == load_config(ROOT / f"configs/recipes/{name}.yaml", ["seed=3"])
    config = load_config(write("own.yaml", "extends: [quickstart, llama3.1-8b]\nname: own\n"))
    assert (config.name, config.batch_tokens, config.model.layers) == ("own", 4096, 32)
    write("quickstart", "extends: recipes/quickstart.yaml")
    assert "recipes/quickstart.yaml (extended by" in problems("quickstart")[0], "a file comes first"


def test_a_name_that_no_packaged_recipe_has_is_refused_with_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.chdir(tmp_path)
    (own,) = problems("own.yml")
    assert own.endswith(" (from " + str(tmp_path) + ")"), "nothing in the folder is close"
    for (problem,) in (problems("quickstrat"), problems(write("own.yaml", "extends: llama-2b"))):
        assert problem.endswith(f"; packaged recipes and models: {', '.join(packaged_recipes())}")
        assert ", mini/sft-1m, " in problem
        assert ", llama-1b, " in problem
        assert any(f" (did you mean {name!r}?)" in problem for name in ("quickstart", "llama-1b")), problem
    assert problems("own.yml")[0].endswith("(did you mean 'own.yaml'?)")


def test_extends_lays_files_over_each_other_in_order(write: Write, recipe: Path) -> None:
    write("models/wide.yaml", "model: {hidden_size: 256, heads: 8}")
    write("fast.yaml", "optim: {lr: 1.0e-2}\nmodel: {heads: 2}\n")
    path = write(
        "top.yaml",
        "extends: [recipe.yaml, models/wide.yaml, fast.yaml]\nname: top\ndata: {train: [{path: only}]}\n",
    )
    config = load_config(path, ["optim.betas=[0.8, 0.9]"])
    assert config.name == "top"
    assert (config.model.hidden_size, config.model.heads, config.model.layers) == (256, 2, 4)
    assert [source.path for source in config.data.train] == ["only"], "lists are replaced"
    assert (config.optim.lr, config.optim.betas) == (1e-2, (0.8, 0.9))


def test_null_takes_back_what_an_extended_recipe_overrides(write: Write, recipe: Path) -> None:
    write("base.yaml", "extends: recipe.yaml\nattention: {overrides: {0: {topk: 2}, 1: {topk: 3}, 2: {topk: 4}}}\n")
    path = write("top.yaml", "extends: base.yaml\nattention: {overrides: {0: null, 1: {kind: full, topk: null}}}\n")
    config = load_config(path)
    check(config)
    first, second, third, _ = stages_of(config)[-1].attention
    assert first == LayerAttention("moba", config.attention.options_of("moba"))
    assert second.kind == "full"
    assert third.options.model_dump()["topk"] == 4
    assert stages_of(load_config(path, ["attention.overrides.2=null"]))[-1].attention[2] == first
    with pytest.raises(ConfigError, match="topk: given 3, but layer 1 is 'full' in all stages"):
        check(load_config(path, ["attention.overrides.1.topk=3"]))
    nope = ["model.rope.overrides={all: {kind: nope}, 1: {kind: none}}"]
    assert [rope.kind for rope in load_config(path, nope).model.rope.by_layer(3)] == ["nope", "none", "nope"]
    rope = load_config(path, [*nope, "model.rope.overrides.all=null"]).model.rope
    assert [one.kind for one in rope.by_layer(3)] == ["none"] * 3


def test_extending_in_a_circle_names_the_chain(write: Write) -> None:
    write("b.yaml", "extends: c.yaml")
    write("c.yaml", "extends: a.yaml")
    (problem,) = problems(write("a.yaml", "extends: b.yaml"))
    assert re.search(r"a\.yaml -> \S*b\.yaml -> \S*c\.yaml -> \S*a\.yaml", problem)


def test_extending_the_same_file_twice_is_no_circle(write: Write, recipe: Path) -> None:
    write("left.yaml", "extends: recipe.yaml\nseed: 1\n")
    write("right.yaml", "extends: recipe.yaml\nseed: 2\n")
    assert load_config(write("both.yaml", "extends: [left.yaml, right.yaml]")).seed == 2


def test_doubled_extends_end_after_a_number_of_files(write: Write) -> None:
    for level in range(40):
        write(f"{level}.yaml", f"extends: [{level + 1}.yaml, {level + 1}.yaml]")
    write("40.yaml", "{}")
    (problem,) = problems(write("top.yaml", "extends: [0.yaml, 0.yaml]"))
    assert re.search(r"extends: reaches \S*39\.yaml as file 65, through \S*38\.yaml; allowed: 64 files", problem)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n" for before, key in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "values, aliases replaced; allowed: 100,000"),
        (
            BOMB.replace("[", "{<<: [").replace("]", "]}").replace("x, ", "").replace("[x]", "{x: 1}"),
            "aliases replaced",
        ),
        ("a: &a {b: *a}", "an alias to this contains itself"),
        ("a: " + "[" * 1000, "is nested too deeply"),
        ("a: " + "{a: " * 1000, "is nested too deeply"),
        ("# " + "x" * RECIPE_BYTES, "allowed: 262,144"),
    ],
    ids=["aliases", "merged aliases", "circle", "lists", "mappings", "size"],
)
def test_a_recipe_that_becomes_too_large_is_refused(write: Write, text: str, said: str) -> None:
    """Written into the file, and in a file that it extends."""
    path = write("bomb.yaml", text)
    for found in (problems(path), problems(write("top.yaml", "extends: bomb.yaml"))):
        assert "bomb.yaml" in found[0]
        assert said in found[0]


def test_devices_and_pipes_end_with_a_message(write: Write, tmp_path: Path) -> None:
    """The recipe itself may be a pipe of the user's; what it extends may not."""
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is a named pipe; allowed: a regular file" in problems(write("top.yaml", "extends: pipe.yaml"))[0]
    assert "is a device; allowed: a regular file" in problems(write("top.yaml", "extends: /dev/zero"))[0]
    assert "has more than 262,144 bytes" in problems(Path("/dev/zero"))[0]


def test_only_the_first_problems_of_very_many_are_explained(recipe: Path, write: Write) -> None:
    text = "".join(f"unknown_{number}: 1\n" for number in range(150))
    found = problems(write("many.yaml", f"extends: recipe.yaml\n{text}"))
    assert len(found) == 101
    assert found[-1] == "... and 50 more problems"


@FUZZ
@given(base=st.dictionaries(keys, values), over=st.dictionaries(keys, values))
def test_merging_keeps_every_key_and_lets_the_later_win(base: dict[str, Any], over: dict[str, Any]) -> None:
    merged = deep_merge(base, over)
    assert set(merged) == set(base) | set(over)
    assert deep_merge(merged, over) == merged
    assert deep_merge({}, over) == over == deep_merge(over, {})
    for key in set(base) - set(over):
        assert merged[key] == base[key]


@FUZZ
@given(path=st.lists(keys, min_size=1, max_size=4), value=values, base=st.dictionaries(keys, st.just(None)))
def test_an_override_sets_its_key_and_nothing_else(path: list[str], value: Any, base: dict[str, Any]) -> None:
    raw = dict(base)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    assert apply_overrides(raw, [f"{'.'.join(path)}={text}"]) == []
    holder = raw
    for key in path[:-1]:
        assert set(holder) == {key} | (set(base) if holder is raw else set())
        holder = holder[key]
    assert holder[path[-1]] == parse_yaml(text, "test")


def test_overrides_reach_list_items_and_layers_by_number(load: Load) -> None:
    config = load("stages.0.tokens=3M", "stages[1].name=late", "attention.overrides.1.topk=3", "data.train.1.weight=9")
    assert config.stages[0].tokens == 3_000_000
    assert config.stages[1].name == "late"
    assert config.attention.overrides == {1: {"topk": 3}}
    assert config.data.train[1].weight == 9


def test_an_item_of_a_list_that_the_recipe_leaves_out_is_set_among_its_defaults(load: Load) -> None:
    assert load("optim.betas.1=0.99").optim.betas == (0.9, 0.99)
    config = load("optim.betas[0]=0.8", "attention.moba.always.0=first")
    assert config.optim.betas == (0.8, 0.95)
    assert config.attention.options_of("moba").model_dump()["always"] == ("first",)


def test_all_problems_of_overrides_and_recipe_come_at_once(recipe: Path) -> None:
    found = problems(
        recipe,
        ["modle.layers=3", "stages.7.tokens=1", "stages.x=1", "name.first=a", "seed", "optim.lr=[", "seed=-1"],
    )
    for part in (
        "modle: unknown key (did you mean 'model'?)",
        "stages[7] does not exist; allowed: 0 to 1",
        "stages is a list",
        "name is 'demo', which holds no 'first'",
        "override 'seed': allowed: key.path=value",
        "override 'optim.lr=['",
        "seed: given -1; allowed: integer >= 0",
    ):
        assert any(part in text for text in found), (part, found)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.hiden_size=3", "model.hiden_size: unknown key (did you mean 'hidden_size'?)"),
        ("stages.1.attention.moba.blocksize=1", "stages[1].attention.moba.blocksize: unknown key (did you mean 'block"),
        ("stages.1.attention.kind=moba", "stages[1].attention.kind: unknown key (did you mean 'default'?)"),
        ("learning_rate=1", "learning_rate: unknown key; allowed here: name, "),
        ("lr=1e-3", "lr: unknown key; a key of that name is at optim.lr and stages[i].lr"),
        ("stages.1.attention.moba.block_size=0", "stages[1].attention.moba.block_size: given 0; allowed: integer >= 1"),
        ("stages.0.rope.kind=yarm", "stages[0].rope.kind: given 'yarm'; allowed: none | abf | pi"),
        ("stages.0.seq_len=4Q", "stages[0].seq_len: given '4Q', which is not a number; write e.g. 4096, 128K"),
        ("batch_tokens=true", "batch_tokens: given true; allowed: integer >= 1 (K, M = 1024)"),
        ("seed=true", "seed: given true; allowed: integer >= 0"),
        ("optim.lr=true", "optim.lr: given true; allowed: number > 0"),
        ("compile=yes", "compile: given 'yes'; allowed: true | false"),
        (
            "parallel.reshard_after_forward=off",
            "parallel.reshard_after_forward: given 'off'; allowed: true | false | budget",
        ),
        ("compile=[1]", "compile: given [1]; allowed: true | false"),
        (
            "parallel.reshard_after_forward={a: 1}",
            "parallel.reshard_after_forward: given {'a': 1}; allowed: true | false | budget",
        ),
        (
            "parallel.reshard_after_forward=1",
            "parallel.reshard_after_forward: given 1; allowed: true | false | budget",
        ),
        ("compile=1", "compile: given 1; allowed: true | false"),
        ("batch_tokens=0", "batch_tokens: given 0; allowed: integer >= 1 (K, M = 1024)"),
        ("optim.lr=.inf", "optim.lr: given inf; allowed: a finite number > 0"),
        ("optim.betas=[0.9, 1.5]", "optim.betas[1]: given 1.5; allowed: list of 2: number >= 0 and < 1"),
        ("optim.betas=[0.9]", "optim.betas[1]: missing; allowed: list of 2"),
        ("optim.betas.1=1.5", "optim.betas[1]: given 1.5; allowed: list of 2: number >= 0 and < 1"),
        (
            "optim.betas.2=0.9",
            "override 'optim.betas.2=0.9': optim.betas[2] does not exist; allowed: 0 to 1",
        ),
        (
            "data.validation.0.path=a",
            "override 'data.validation.0.path=a': data.validation has no items; set data.validation itself",
        ),
        (
            "attention.full_layers.0=3",
            "override 'attention.full_layers.0=3': attention.full_layers is left out, its default is 'none'; set "
            "attention.full_layers itself, text | list of integer",
        ),
        (
            "stages.0.train.0.weight=3",
            "override 'stages.0.train.0.weight=3': stages[0].train is left out, so that the recipe's counts; set "
            "stages[0].train itself, non-empty list of sections | null",
        ),
        ("data.train=[]", "data.train: given []; allowed: non-empty list of sections, such as [{path: ...}]"),
        ("attention.full_layers=1.5", "attention.full_layers: given 1.5; allowed: text | list of integer"),
        ("attention.overrides={a: {}}", "attention.overrides: given layer a; allowed: layer ids, counted from 0, all"),
        (
            "model.rope.overrides={every:2: {kind: nop}}",
            "model.rope.overrides: every:2.kind: given 'nop'; allowed: none | abf | pi",
        ),
        (
            "stages.0.rope.overrides={1: {thet: 5}, 2: {theta: x}}",
            "stages[0].rope.overrides: 1.thet: unknown key (did you mean 'theta'?); allowed here: kind, theta, ",
        ),
        ("run_dir=''", "run_dir: given ''; allowed: non-empty text"),
        ("precision=bf16", "precision: given 'bf16'; allowed: a section with the keys compute"),
        ("model.vocab_size=", "model.vocab_size: given null; allowed: integer >= 2"),
    ],
)
def test_a_mistake_names_its_key_what_was_given_and_what_is_allowed(recipe: Path, override: str, problem: str) -> None:
    (found,) = problems(recipe, [override])
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "path",
    [
        "parallel.timeout",
        "health.spike.window",
        "optim.lr",
        "optim.eps",
        "optim.weight_decay",
        "stages.0.lr",
        "stages.0.tokens",
        "batch_tokens",
        "data.train.0.weight",
        "evaluation.sequences",
        "evaluation.position_wise.sequences",
        "attention.moba.topk",
        "attention.moba.block_size",
    ],
)
@pytest.mark.parametrize("number", ["1e300", "99999999999999999999"])
def test_numbers_that_overflow_later_are_refused(recipe: Path, path: str, number: str) -> None:
    (problem,) = problems(recipe, [f"{path}={number}"])
    assert re.sub(r"\[(\d+)\]", r".\1", problem).startswith(f"{path}: given ")
    assert "; allowed: " in problem


def test_missing_keys_say_what_they_need(write: Write) -> None:
    found = problems(write("empty.yaml", ""))
    assert "batch_tokens: missing; allowed: integer >= 1 (K, M = 1024)" in found
    (model,) = (text for text in found if text.startswith("model: missing; allowed: section, such as {vocab_size: ..."))
    assert model.endswith("; or take a packaged one, such as `extends: qwen3-0.6b`")
    assert (
        "stages: missing; allowed: non-empty list of sections, such as [{name: ..., seq_len: ..., tokens: ...}]"
        in found
    )


def _assert_config_or_error(path: Path) -> None:
    with suppress(ConfigError):
        check(load_config(path), ranks=2, check_files=True)


@FUZZ
@given(text=st.text(st.sampled_from("ab:-[]{},\"'#&*!|>%@` \n\t0e.~<?\x00\x07é"), max_size=40))
def test_any_text_gives_a_recipe_or_a_config_error(write: Write, text: str) -> None:
    _assert_config_or_error(write("fuzz.yaml", text))


def _paths(data: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [prefix] * bool(prefix) + [path for key, value in items for path in _paths(value, (*prefix, key))]


@FUZZ
@given(data=st.data(), value=values | st.dictionaries(st.integers() | st.booleans() | keys, values, max_size=2))
def test_any_value_in_any_place_gives_a_recipe_or_a_config_error(
    recipe: Path, write: Write, data: st.DataObject, value: Any
) -> None:
    raw = yaml.safe_load(recipe.read_text())
    *parents, last = data.draw(st.sampled_from(_paths(raw)))
    holder = raw
    for key in parents:
        holder = holder[key]
    holder[last] = value
    _assert_config_or_error(write("fuzz.yaml", yaml.safe_dump(raw)))


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_shape_loads_into_a_recipe(write: Write, recipe: Path, path: Path) -> None:
    top = write("top.yaml", f"extends: [recipe.yaml, {path.resolve()}]")
    content = yaml.safe_load(path.read_text())
    if "moe" in content.get("model", {}) and "moe" not in FEED_FORWARDS:
        pytest.skip("the core alone has no experts")
    assert set(content) <= {"model", "extends"}
    assert load_config(top).model.layers >= 1


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp foo", "!!int ''", "!!float ''", "!!int '-'"])
def test_text_that_its_tag_does_not_allow_is_named_with_its_line(value: str) -> None:
    """PyYAML's own errors for it are those of Python."""
    said = rf"is no {value.split()[0]}; leave the tag out"
    with pytest.raises(ConfigError, match=rf"test, line 2, column 7: not valid YAML: .* {said}"):
        parse_yaml(f"name: x\nseed: {value}\n", "test")
    raw: dict[str, object] = {}
    (problem,) = apply_overrides(raw, [f"seed={value}"])
    assert re.search(said, problem)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("{1: {topk: 1}, '1': {block_size: 32}}", r"overrides: layer 1 is given twice, as 1 and '1'; name it once"),
        ("{true: {topk: 1}}", r"overrides: given layer true; allowed: layer ids, counted from 0"),
    ],
)
def test_a_layer_has_one_override(load: Load, overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(f"attention.overrides={overrides}")
    assert load("attention.overrides={'1': {kind: full}}").attention.overrides == {1: {"kind": "full"}}


def test_an_eps_that_float32_does_not_have_is_refused(load: Load) -> None:
    """A step without a gradient would divide zero by zero."""
    with pytest.raises(ConfigError, match=r"optim.eps: given 1e-50; allowed: .*1e-30"):
        load("optim.eps=1e-50")


HIDDEN = [
    ("optim.lr=1e-3", {"lr": 1e-5}),
    ("micro_batch_size=4", {"micro_batch_size": 2}),
    ("data.train.0.weight=2", {"train": [{"path": "a"}]}),
    ("attention.moba.topk=8", {"attention": {"moba": {"topk": 2}}}),
    ("attention.default=full", {"attention": {"default": "moba"}}),
    ("attention.overrides.1.topk=3", {"attention": {"overrides": {}}}),
    ("attention.full_layers=[0, 1]", {"attention": {"full_layers": "none"}}),
    ("model.rope.theta=1e6", {"rope": {"theta": 1e5}}),
    ("parallel.cp=1", {"parallel": {"cp": 1}}),
]


@pytest.mark.parametrize(("override", "given"), HIDDEN)
def test_an_override_that_every_stage_hides_is_refused_with_the_one_to_give(
    recipe: Path, write: Write, override: str, given: dict[str, Any]
) -> None:
    stages = [{"name": name, "seq_len": 2048, "tokens": 10**6} for name in ("one", "two")]

    def file(*own: dict[str, Any]) -> Path:
        content = {"extends": recipe.name, "stages": [stage | more for stage, more in zip(stages, own, strict=True)]}
        return write("other.yaml", yaml.safe_dump(content))

    assert load_config(file(given, {}), [override]), "the second stage uses it"
    path = file(given, given)
    (problem,) = problems(path, [override])
    key, _, value = override.partition("=")
    own = next(iter(given)) + key.removeprefix({"optim.lr": key, "micro_batch_size": key}.get(key, key.split(".")[0]))
    own = {"data.train.0.weight": "train.0.weight", "model.rope.theta": "rope.theta"}.get(key, own)
    assert problem.startswith(f"override '{override}': would change nothing, as every stage sets {own} itself; give ")
    instead = shlex.split(problem.partition("; give ")[2])
    assert instead == [f"stages.{index}.{own}={value}" for index in (0, 1)]
    assert load_config(path, instead)
    assert load_config(path, [override, *instead]), "as where `plan` suggests them for a command"


MOBA = "attention: {moba: {topk: 2}}"


def test_an_override_beside_what_every_stage_sets_is_no_hidden_one(recipe: Path, write: Write) -> None:
    path = write("other.yaml", f"extends: {recipe.name}\nstages:\n- {{name: a, seq_len: 2K, tokens: 1M, {MOBA}}}\n")
    assert load_config(path, ["attention.moba.block_size=64", "attention.full_layers=last:1"])
    assert load_config(path, ["attention={moba: {topk: 9, block_size: 64}}"])
