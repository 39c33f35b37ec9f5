"""An export with code runs in transformers where this package cannot be imported, and says what our model says.

MOBA_EXPORT_PYTHON: another Python to run it in, such as that of an environment with torch and transformers alone.
"""

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.window import WindowKind
from moba_train.model.transformer import Transformer
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.convert.remote_code.options import LAYERS
from moba_train.tools.convert.with_code import code_families, code_problems
from moba_train.tools.evaluate import load_on_this_machine
from moba_train.tools.evaluated_recipe import EvaluationOptions, open_for_evaluation
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.inference.generate import Sampling, generate_batch
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.tools.convert import without_package
from tests.tools.convert.code_models import (
    AS_TRAINED,
    BLOCKS,
    CUT,
    LAYERS_OF,
    PARAMETRIC,
    PROMPTS,
    SIZES,
    YARN,
    save_model,
    save_run,
)
from tests.tools.convert.hf_models import logits, make_hf_model
from tests.tools.convert.without_package import NEW


class Exported(NamedTuple):
    """Our model, its export, and what that says elsewhere."""

    name: str
    model: Transformer
    folder: Path
    answers: dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports in float32, which loses nothing, asked in another process; by family."""
    root = tmp_path_factory.mktemp("with_code")
    torch.save(PROMPTS, root / "prompts.pt")
    for family, layers in LAYERS_OF.items():
        (root / family).mkdir()
        save_run(root / family, family, layers)
        saved = open_checkpoint(root / family / "run")
        export_to_hf(saved, root / family / "out", torch.float32, shard_bytes=40_000, with_code=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # transformers would compile FlexAttention
    subprocess.run(
        [os.environ.get("MOBA_EXPORT_PYTHON", sys.executable), str(without_package.__file__), "prompts.pt", *LAYERS_OF],
        env=environment | {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"},
        cwd=root,
        check=True,
    )
    return {family: root / family for family in LAYERS_OF}


@pytest.fixture(scope="module", params=[*LAYERS_OF])
def exported(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Exported:
    folder = folders[request.param]
    model = load_trained(open_checkpoint(folder / "run"), torch.device("cpu"), torch.float64)
    return Exported(request.param, model, folder / "out", torch.load(folder / "answers.pt"))


def test_logits_are_ours(exported: Exported) -> None:
    """With all implementations of full attention, and up to rounding in bfloat16."""
    expected = logits(exported.model, PROMPTS[0])
    for name in ("logits", "eager", "flex_attention"):
        torch.testing.assert_close(exported.answers[name], expected, rtol=0, atol=1e-10)
    difference = (exported.answers["bfloat16"] - expected).abs()
    assert difference.median() < 0.05 < expected.std()


@pytest.mark.parametrize("exported", AS_TRAINED, indirect=True)
def test_decoding_as_trained_equals_one_pass(exported: Exported) -> None:
    """A prompt, then its tokens one by one, then many at once, in one cache."""
    torch.testing.assert_close(exported.answers["decoded"], exported.answers["logits"], rtol=0, atol=1e-10)


def test_padding_changes_nothing(exported: Exported) -> None:
    """Padding behind a prompt neither, except where the mean query of the last block selects."""
    expected = logits(exported.model, PROMPTS[1])
    for name in ("short", "padded", *["padded right"] * (exported.name != "seer")):
        torch.testing.assert_close(exported.answers[name], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("decode", ["full", "own"])
def test_a_padded_batch_generates_what_ours_does(exported: Exported, decode: Any) -> None:
    """The first call of `generate` attends as the layers do; new tokens as `decode` says."""
    prompts = [prompt.tolist() for prompt in PROMPTS]
    answered = exported.answers[f"generated {decode}"]
    if exported.name not in AS_TRAINED:
        decode = "full"
    steps = [*generate_batch(exported.model, prompts, NEW, Sampling(temperature=0), decode=decode)]
    expected = [[step[row] for step in steps] for row in range(len(prompts))]
    assert answered.tolist() == expected


def test_a_static_cache_generates_the_same(exported: Exported) -> None:
    for decode in ("full", "own"):
        assert exported.answers[f"static {decode}"].tolist() == exported.answers[f"generated {decode}"].tolist()


@pytest.mark.parametrize("exported", [name for name in CUT if name in AS_TRAINED], indirect=True)
def test_speculative_decoding_cuts_the_cache(exported: Exported) -> None:
    """Guesses are those of the prompt, and those of a model that attends otherwise."""
    for name in ("looked up", "assisted"):
        # transformers 5.0 may give one more than it was asked for.
        assert exported.answers[name].tolist()[:NEW] == exported.answers["generated own"][0].tolist()


@pytest.mark.parametrize("exported", ["states"], indirect=True)
def test_speculative_decoding_with_a_state_is_refused(exported: Exported) -> None:
    assert "not supported with stateful models" in exported.answers["looked up"]
    assert "cannot be cut" in exported.answers["cut"]


@pytest.mark.parametrize("exported", AS_TRAINED, indirect=True)
def test_beams_reorder_the_cache(exported: Exported) -> None:
    answers = exported.answers
    torch.testing.assert_close(torch.stack(answers["beams"]), answers["beam scores"].double(), rtol=0, atol=1e-4)


def test_eval_and_generate_read_the_folder(exported: Exported) -> None:
    """So does lm-eval: all of them load it so. The parameters of attention kinds are not those of chance."""
    saved = open_for_evaluation(exported.folder, EvaluationOptions(tasks=()))
    expected = logits(exported.model, PROMPTS[0]).float()
    torch.testing.assert_close(logits(load_on_this_machine(saved), PROMPTS[0]), expected, rtol=0, atol=1e-4)


def loaded_here(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The model of an export, by the package's own copy of the code."""
    from transformers import AutoConfig

    from moba_train.tools.convert.remote_code import modeling

    own = json.loads((folder / "config.json").read_text())["model_type"] == "moba_train"
    config = (modeling.MobaConfig if own else AutoConfig).from_pretrained(folder)
    return modeling.MobaForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


@pytest.mark.parametrize("exported", ["experts"], indirect=True)
def test_biases_of_the_choice_of_experts_stay_in_float32(exported: Exported, tmp_path: Path) -> None:
    """Steps of 16 bits are larger than those by which training moves them."""
    saved = open_checkpoint(exported.folder.parent / "run")
    export_to_hf(saved, tmp_path / "out", torch.bfloat16, 2**30, with_code=True)
    theirs = loaded_here(tmp_path / "out", torch.bfloat16).get_submodule("model.layers.0.mlp")
    assert theirs.router.weight.dtype == torch.bfloat16
    expected: Any = load_trained(saved, torch.device("cpu"), torch.float32).blocks[0].feed_forward
    torch.testing.assert_close(theirs.bias, expected.bias, rtol=0, atol=0)
    assert expected.bias.any()


@pytest.mark.parametrize("exported", AS_TRAINED, indirect=True)
def test_a_padded_batch_is_read_in_parts(exported: Exported) -> None:
    """The first part holds nothing but padding of the shorter text."""
    theirs = loaded_here(exported.folder)
    long, short = PROMPTS
    first = len(long) - len(short)
    batch = torch.stack([long, torch.cat([short[:1].expand(first), short])])
    mask = (torch.arange(len(long)) >= torch.tensor([[0], [first]])).long()
    cache = None
    outs = []
    with torch.no_grad():
        for part in torch.arange(len(long)).split([first - 7, 30, len(long) - first - 23]):
            upto = int(part[-1]) + 1
            out = theirs(batch[:, part], attention_mask=mask[:, :upto], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            outs.append(out.logits)
    found = torch.cat(outs, 1)
    torch.testing.assert_close(found[0], logits(exported.model, long), rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1, first:], logits(exported.model, short), rtol=0, atol=1e-10)


def test_chunks_of_queries_and_gradients(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are read a chunk of queries at a time, and what is trained elsewhere gets the gradients of ours."""
    from moba_train.tools.convert.remote_code import attention

    monkeypatch.setattr(attention, "_SCORES", 6000)
    theirs = loaded_here(exported.folder)
    tokens = PROMPTS[0]
    found = theirs(tokens[None]).logits[0]
    expected = exported.model(tokens, torch.arange(len(tokens)), packed_layout([len(tokens)]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    ours: Any = exported.model.blocks[0].attention
    layer: Any = theirs.get_submodule("model.layers.0.self_attn")
    for mine, yours in ((ours.q_proj, layer.q_proj), (ours.k_proj, layer.k_proj), (ours.v_proj, layer.v_proj)):
        (one,) = torch.autograd.grad(expected.square().mean(), mine.weight, retain_graph=True)
        (other,) = torch.autograd.grad(found.square().mean(), yours.weight, retain_graph=True)
        torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-12)
    deepcopy(theirs)  # no module keeps a tensor of the graph


def test_trainer_and_generate_may_give_what_they_give_all_models(exported: Exported) -> None:
    """The number of tokens that a loss is divided by, autocast to 16 bits, and the tokenizer for stop strings."""
    theirs = loaded_here(exported.folder, torch.float32)
    tokens = PROMPTS[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = theirs(tokens[None], labels=tokens[None], num_items_in_batch=7, tokenizer="of `stop_strings`").loss
    found.backward()
    expected = torch.nn.functional.cross_entropy(logits(exported.model, tokens)[:-1], tokens[1:], reduction="sum") / 7
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)


def test_it_comes_back_as_a_checkpoint(exported: Exported, tmp_path: Path) -> None:
    """With the parameters of attention kinds; also if transformers has loaded and saved it."""
    torch.testing.assert_close(exported.answers["saved"], exported.answers["logits"], rtol=0, atol=1e-10)
    expected = logits(exported.model, PROMPTS[0])
    for name in ("out", "saved"):
        import_from_hf(exported.folder.parent / name, tmp_path / name)
        again = load_trained(open_checkpoint(tmp_path / name), torch.device("cpu"), torch.float64)
        torch.testing.assert_close(logits(again, PROMPTS[0]), expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_on_a_gpu_it_says_the_same(exported: Exported) -> None:
    from transformers import AutoModelForCausalLM

    expected = logits(exported.model, PROMPTS[0])
    for dtype, most in ((torch.float64, 1e-8), (torch.bfloat16, 0.05)):
        model: Any = AutoModelForCausalLM.from_pretrained(exported.folder, trust_remote_code=True, dtype=dtype)
        model.cuda().eval()
        with torch.no_grad():
            assert (model(PROMPTS[0][None].cuda()).logits[0].cpu() - expected).abs().median() < most
        prompt = {"input_ids": PROMPTS[0][None].cuda(), "attention_mask": torch.ones_like(PROMPTS[0][None]).cuda()}
        said = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, -NEW:]
        assert dtype != torch.float64 or said.tolist() == exported.answers["generated full"][0].tolist()


def test_what_the_code_cannot_do_is_refused_by_name(exported: Exported) -> None:
    messages = {
        "quantized": "cache: StaticCache given, allowed: a DynamicCache or StaticCache",
        "overfull": "cache: 150 tokens given, allowed: 149",
        "holes": "attention_mask: has padding between tokens",
        "packed": "position_ids: begin again",
        "attentions": "output_attentions: given",
        "decode": "moba_decode: 'moba' given, allowed: full, own",
        # Guesses that are checked together would be read otherwise than one at a time.
        "guesses": {
            "states": "not supported with stateful models",
            "seer": "speculative decoding: not supported by layers of kind 'seer'",
        }.get(exported.name, "moba_decode: 'full' given, allowed with speculative decoding: own"),
    }
    for name, message in messages.items():
        assert message in exported.answers[name]


def test_the_code_is_one_file(exported: Exported) -> None:
    """In which nothing is defined twice, and which transformers saves with what it has trained further."""
    for folder in (exported.folder, exported.folder.parent / "saved"):
        (file,) = folder.glob("*.py")
        assert file.name == "modeling_moba_train.py"
    defined = re.findall(r"^(?:def |class )?(\w+)(?:\(|:| =)", file.read_text(), re.MULTILINE)
    assert sorted({*defined} - {"KINDS"}) == sorted(name for name in defined if name != "KINDS")


def test_the_class_is_that_of_the_config(exported: Exported) -> None:
    """transformers 5.17 loads no other."""
    one, other = exported.answers["configs"]
    assert one == other


def test_only_what_needs_the_code_is_refused_without_trust(exported: Exported) -> None:
    """Programs that go by the architecture refuse it, and so does transformers: it would run another function."""
    text = (exported.folder / "config.json").read_text()
    assert "backend" not in text
    config = json.loads(text)
    needed = any(layer.get("key_conv") or layer["kind"] in PARAMETRIC for layer in config["moba"]["layers"])
    if exported.name == "llama3":
        assert not needed
        assert exported.answers["ordinary"] == "LlamaForCausalLM"
        assert config["architectures"] == ["LlamaForCausalLM"]
    else:
        assert needed or exported.name == "sinks"
        assert "trust_remote_code=True" in exported.answers["ordinary"]
        assert (config["model_type"], config["architectures"]) == ("moba_train", ["MobaForCausalLM"])


def test_the_card_says_what_the_run_knows(exported: Exported) -> None:
    card = (exported.folder / "README.md").read_text()
    assert "| long | 256 | 512 |" in card
    assert "books (75.0%), web (25.0%)" in card
    assert card.count(".from_pretrained(FOLDER, trust_remote_code=True)") == 2  # for the tokenizer, not to be asked
    assert '`moba_decode="own"` they attend as their layer does, unless it is `seer`.' in card
    for entry in json.loads((exported.folder / "config.json").read_text())["moba"]["layers"]:
        assert f"| {entry['kind']} |" in card
    assert "The run folder has no evaluation of this checkpoint." in card


def test_the_code_knows_the_options_of_its_kinds() -> None:
    """But the backend, which no other program has, and those that do nothing unless they are given: with these it
    refuses a model."""
    from moba_train.tools.convert.remote_code import modeling

    assert modeling.KINDS.keys() == LAYERS.keys()
    for name, options in LAYERS.items():
        fields = KINDS[name].Options.model_fields
        assert options <= fields.keys()
        assert all(fields[key].default is None for key in fields.keys() - options - {"backend"})


def test_a_model_with_anything_unknown_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts is one that only the code runs; its code knows all keys of the section."""
    from moba_train.tools.convert.remote_code import experts

    monkeypatch.setitem(LAYERS, "window", {"window"})
    (problem,) = code_problems([WindowKind(WindowKind.Options(window=8, sinks=2), 8)], [])
    assert problem.startswith("option 'sinks' of kind 'window' is unknown")
    parts = {"parts": [{"groups": [1], "kind": "moba_v1", "options": BLOCKS}]}
    (problem,) = code_problems([KINDS["by_group"](KINDS["by_group"].Options.model_validate(parts), 8)], [])
    assert problem.startswith("kind 'moba_v1' is not one of full")
    save_run(tmp_path, "qwen2", [{"kind": "moba_v05", "block_size": 16, "topk": 3}])
    saved = open_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="kind 'moba_v05' is not one of full, window, moba, moba_window, msa"):
        export_to_hf(saved, tmp_path / "out", torch.float32, shard_bytes=40_000, with_code=True)
    assert not (tmp_path / "out").exists()
    model = saved.config.model.model_copy(update={"residual_scale": 0.5})
    assert hf_config(model, model.rope, 256, "float32", families=code_families(False))["model_type"] == "moba_train"
    moe = ModelConfig.model_validate(model.model_dump() | {"moe": {"experts": 4, "active": 2, "intermediate_size": 16}})
    contents = hf_config(moe, moe.rope, 256, "float32", families=code_families(False))
    written = contents["moba"]["model"]["moe"]
    assert (contents["model_type"], written["layers"]) == ("moba_train", [*range(model.layers)])
    assert written.keys() == experts.KEYS
    assert written["router"].keys() == experts.ROUTER


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_layers_that_have_rotary_embeddings_of_their_own(tmp_path: Path, family: str) -> None:
    """However the recipe spells them: the layers with a window may be the exception, or the others."""
    make_hf_model(family, tmp_path)
    model = read_model_config(tmp_path)
    assert len(set(model.rope.by_layer(model.layers))) == 2
    contents = hf_config(model, model.rope, 256, "float32", families=code_families(True))
    assert contents["model_type"] == "moba_train"


@pytest.mark.parametrize("residual_scale", [1.0, 0.5])
def test_yarn_that_does_not_round_is_computed_as_trained(tmp_path: Path, residual_scale: float) -> None:
    """In an ordinary model, and in one that only the code can run."""
    shape = SIZES | {"rope": YARN | {"truncate": False}, "residual_scale": residual_scale}
    save_model(tmp_path, shape, [{"kind": "full"}] * 3)
    saved = open_checkpoint(tmp_path / "run")
    export_to_hf(saved, tmp_path / "out", torch.float32, 2**30, with_code=True)
    with torch.no_grad():
        found = loaded_here(tmp_path / "out")(PROMPTS[0][None]).logits[0]
    expected = logits(load_trained(saved, torch.device("cpu"), torch.float64), PROMPTS[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_longrope_is_refused_by_name(tmp_path: Path) -> None:
    factors = {"short_factors": [1.0] * 4, "long_factors": [2.0] * 4}
    rope = {"kind": "longrope", "factor": 4.0, "original_seq_len": 64, **factors}
    save_model(tmp_path, SIZES | {"rope": rope}, [{"kind": "full"}] * 3)
    with pytest.raises(CheckpointError, match="rope 'longrope' is not one of none, abf, pi, yarn, llama3, nope"):
        export_to_hf(open_checkpoint(tmp_path / "run"), tmp_path / "out", torch.float32, 2**30, with_code=True)
    assert not (tmp_path / "out").exists()


def test_groups_without_parameters_go_out_without_code(tmp_path: Path) -> None:
    """Not for attention inside of transformers, and without what says how a part is computed."""
    parts = [{"groups": [0], "kind": "moba", "options": BLOCKS | {"backend": "reference"}}]
    save_run(tmp_path, "qwen2", [{"kind": "by_group", "parts": parts}])
    export_to_hf(open_checkpoint(tmp_path / "run"), tmp_path / "out", torch.float32, shard_bytes=2**30)
    assert "backend" not in (tmp_path / "out" / "config.json").read_text()
    assert "with the attention above.\n" in (tmp_path / "out" / "README.md").read_text()
    import_from_hf(tmp_path / "out", tmp_path / "again")
    models = [load_trained(open_checkpoint(tmp_path / name), torch.device("cpu")) for name in ("run", "again")]
    assert torch.equal(*(logits(model, PROMPTS[0]) for model in models))


def test_without_code_there_is_a_card_and_no_code(tmp_path: Path) -> None:
    save_run(tmp_path, "qwen2", [{"kind": "moba", "block_size": 16, "topk": 3}])
    saved = open_checkpoint(tmp_path / "run")
    evaluation = {"step": 2, "attention": "moba", "numbers": {"validation_loss": 2.5}}
    (tmp_path / "run" / "evaluations").mkdir()
    (tmp_path / "run" / "evaluations" / "step_2.json").write_text(json.dumps(evaluation))
    (tmp_path / "run" / "evaluations" / "other.json").write_text(json.dumps(evaluation | {"step": 1}))
    (tmp_path / "run" / "evaluations" / "torn.json").write_text("{")
    export_to_hf(saved, tmp_path / "out", torch.float32, shard_bytes=2**30)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| step_2.json | moba | validation_loss | 2.5 |" in card
    assert "other.json" not in card
    assert "trust_remote_code" not in card
    assert "any program runs with full attention in all layers. moba_train runs it with the attention above" in card
    assert not any((tmp_path / "out" / name).exists() for name in ("modeling_moba_train.py", "kernels"))
