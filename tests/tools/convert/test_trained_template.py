"""The chat template that wrote the conversations of training is that of the checkpoint and of its export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_tools.cli import app as data_app
from moba_train.data.indexed import IndexedDataset
from moba_train.tools.chat.template import BUILT_IN
from moba_train.tools.cli import app
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer
from moba_train.train import main
from tests.commands import run_app
from tests.data_tools.test_sft import write_lines
from tests.data_tools.test_sft_messages import byte_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "A number."},
]
IMPORTED = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}{{ messages[0].content }}"
"""The template that came with the tokenizer of the imported model."""
OWN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}\n" + (
    "{{ '[assistant]' if add_generation_prompt }}"
)
RECIPE: dict[str, Any] = {
    "name": "test",
    "run_dir": "run",
    "model": {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "tie_embeddings": False,
    },
    "attention": {"default": "full"},
    "data": {"tokenizer": "model/tokenizer.json", "train": [{"path": "chat"}], "packing": "best_fit"},
    "batch_tokens": 256,
    "stages": [{"name": "only", "seq_len": 128, "tokens": 256}],
    "telemetry": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an imported model's tokenizer and template, and conversations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOBA_TRAIN_DATA_ROOTS", raising=False)
    Path("model").mkdir()
    byte_tokenizer(tmp_path / "model", ["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": IMPORTED}
    Path("model/tokenizer_config.json").write_text(json.dumps(config))
    Path("model/chat_template.jinja").write_text(IMPORTED)
    write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES}] * 40)
    return tmp_path


def sft(output: str, *options: str, source: str = "chat.jsonl") -> None:
    words = ["sft", "--input", source, "--tokenizer", "model", "--output", output, *options]
    run_app(data_app, *words)


def train(**changes: Any) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | changes))
    assert main(["recipe.yaml"]) == 0


def export(output: str = "out") -> tuple[Path, str]:
    done = run_app(app, "convert", "moba-to-hf", "run", output)
    return Path(output), done.output


@pytest.mark.parametrize("corpora", ["there", "gone"])
def test_an_export_has_the_template_of_training_and_not_the_imported_models(folder: Path, corpora: str) -> None:
    sft("chat", "--template", "chatml")
    ids = IndexedDataset("chat").document(0).tolist()
    train()
    if corpora == "gone":
        for file in folder.glob("chat.*"):
            file.unlink()
    out, said = export()
    assert "warning" not in said
    assert (out / "chat_template.jinja").read_text() == BUILT_IN["chatml"][0]
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(out)
    assert list(theirs.apply_chat_template(MESSAGES)["input_ids"]) == ids
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [theirs.eos_token_id, theirs.convert_tokens_to_ids("<|im_end|>")], "where an answer ends"


def test_special_tokens_of_the_template_are_those_of_its_own_folder(folder: Path) -> None:
    """The template was taken from a model whose texts begin with another token than those of the tokenizer."""
    Path("other").mkdir()
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": OWN}
    Path("other/tokenizer_config.json").write_text(json.dumps(tokens))
    sft("chat", "--template", "other")
    train()
    out, _ = export()
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(out)
    assert theirs.bos_token == "<s>"
    found = list(theirs.apply_chat_template(MESSAGES)["input_ids"])
    assert found == IndexedDataset("chat").document(0).tolist()


def test_generate_writes_a_users_message_by_the_template_of_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def generated(_model: object, prompt: list[int], *_: object, **_options: object) -> Iterator[int]:
        read.append(prompt)
        return iter(())

    sft("chat", "--template", "chatml")
    train()
    monkeypatch.setattr("moba_train.tools.generate.generate", generated)
    words = ["generate", "run", "--prompt", "What is two?", "--chat", "--max-new-tokens", "1"]
    run_app(app, *words)
    prompt = "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\n"
    assert read == [ChatTokenizer(load_text_tokenizer("model")).encode(prompt)]


def test_tokens_have_no_template(folder: Path) -> None:
    """Records of tokens were not written by `--template`, whose default is chatml."""
    tokens = write_lines(folder / "tokens.jsonl", [{"input_ids": [*range(60)], "loss_mask": [0] * 30 + [1] * 30}] * 9)
    sft("chat", source=tokens)
    train()
    out, said = export()
    assert (out / "chat_template.jinja").read_text() == IMPORTED
    assert "the chat template is the tokenizer's own: no corpus records the one that wrote" in said


def test_corpora_with_different_templates_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.jinja").write_text(OWN)
    sft("first", "--template", "own.jinja", "--end-of-turn", "<|im_end|>")
    sft("chat", "--template", "chatml")
    stages = [{"name": "one", "seq_len": 128, "tokens": 256, "train": [{"path": "first"}]}, RECIPE["stages"][0]]
    train(stages=stages)
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: the conversations of chat (data.train[0]) and first (stages[0].train[0]) were made with" in said
    out, said = export()
    assert (out / "chat_template.jinja").read_text() == BUILT_IN["chatml"][0], "of the last stage"
    assert "chat_template.jinja is not the template of first" in " ".join(said.split())


def test_a_checkpoint_from_before_a_stage_does_not_have_its_template(folder: Path) -> None:
    Path("own.jinja").write_text(OWN)
    sft("first", "--template", "own.jinja", "--end-of-turn", "<|im_end|>")
    sft("chat", "--template", "chatml")
    stages = [{"name": "one", "seq_len": 128, "tokens": 512, "train": [{"path": "first"}]}, RECIPE["stages"][0]]
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"stages": stages}))
    assert main(["recipe.yaml", "--stop-at-step", "1"]) == 0
    out, _ = export()
    assert (out / "chat_template.jinja").read_text() == OWN
