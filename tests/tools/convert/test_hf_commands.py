"""The commands, with a real tokenizer.json: Hugging Face folder to checkpoint, text, and back."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from moba_train.errors import DataError
from moba_train.tools.cli import app
from moba_train.tools.convert.hf import imported_recipe
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.commands import run_app
from tests.run.test_float8 import finished
from tests.run.tiny_run import Run
from tests.tools.convert.hf_models import VOCAB, make_hf_model

__all__ = ["finished"]

PROMPT = "the cat sat on the mat"


def invoke(*arguments: str) -> str:
    return run_app(app, *arguments).output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder `hf` with a tokenizer of byte-level BPE, and `imported`, the checkpoint of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = tmp_path_factory.mktemp("commands")
    make_hf_model("smollm2", path / "hf")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([PROMPT, "where is the dog, and who let him out?"], trainer)
    tokenizer.save(str(path / "hf" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    invoke("convert", "hf-to-moba", str(path / "hf"), str(path / "imported"))
    return path


def test_generation_says_what_transformers_says(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    invoke("verify", str(folder / "imported"))
    options = ("--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "0")
    ours = invoke("generate", str(folder / "imported"), *options)
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    tokens = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    stop = tokenizer.eos_token_id
    with torch.no_grad():
        theirs = model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=stop, pad_token_id=stop)
    said = tokenizer.decode(theirs[0])
    assert isinstance(said, str)
    assert ours.rstrip("\n") == said.replace("<end>", "").rstrip("\n")


@pytest.mark.parametrize(("output", "name"), [("my model é", "my-model--"), (".", "work"), ("a/../b", "b")])
def test_any_folder_s_name_makes_the_name_of_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, name: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    invoke("convert", "hf-to-moba", str(folder / "hf"), output)
    recipe = yaml.safe_load(Path(output, "recipe.yaml").read_text())
    assert (recipe["name"], recipe["run_dir"]) == (name, f"runs/{name}")
    assert recipe["init_from"] == str(Path(output))
    assert imported_recipe(folder / "hf", Path("/")).name == "imported"


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)])
def test_an_import_that_fails_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int
) -> None:
    def write(*_: object) -> None:
        raise raised

    monkeypatch.setattr("moba_train.checkpoint.writer.ShardFile.write", write)
    done = run_app(app, "convert", "hf-to-moba", folder / "hf", tmp_path / "new", code=code)
    assert code == 130 or "new: cannot be written ([Errno 28] No space left on device)" in done.stderr
    assert not (tmp_path / "new").exists()


def test_export_brings_weights_and_tokenizer_back(folder: Path) -> None:
    invoke("convert", "moba-to-hf", str(folder / "imported"), str(folder / "out"), "--dtype", "float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "out" / name).read_bytes() == (folder / "hf" / name).read_bytes()
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert [layer["kind"] for layer in config["moba"]["layers"]] == ["full"] * 3
    invoke("convert", "hf-to-moba", str(folder / "out"), str(folder / "again"))
    first, second = (next((folder / name / "checkpoints").rglob("*.safetensors")) for name in ("imported", "again"))
    assert first.read_bytes() == second.read_bytes()
    options = ("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "8")
    assert invoke("generate", str(folder / "out"), *options) == invoke("generate", str(folder / "imported"), *options)


def test_a_tokenizer_is_a_file_or_its_folder(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(folder / "hf")
    assert tokenizer.decode(tokenizer.encode(PROMPT)) == PROMPT
    known = json.loads((folder / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, len(known))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_text_tokenizer(tmp_path)


def test_its_export_is_a_plain_model(finished: Run, tmp_path: Path) -> None:
    run_app(app, "convert", "moba-to-hf", finished.run_dir, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
