"""Documents for miniatures: real passages, and answers that depend only on the document itself."""

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from data_tools.cli import app
from tests.commands import run_app
from tests.data_tools.prose import prose

CHARACTERS = 60_000


def make(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(prose(0, 30_000))
    command = ["long-range", "--input", str(folder / "text.txt"), "--output", str(folder / "long.jsonl")]
    run_app(app, *command, *arguments)
    return [json.loads(line) for line in (folder / "long.jsonl").read_text().splitlines()]


def test_repeats_and_answers_are_those_of_the_same_document_from_near_and_far(tmp_path: Path) -> None:
    documents = [record["text"] for record in make(tmp_path, "--documents", "3", "--characters", str(CHARACTERS))]
    assert len(documents) == 3
    assert len(set(documents)) == 3
    distances = []
    for text in documents:
        assert len(text) >= CHARACTERS
        first = {m[1]: m for m in re.finditer(r"### passage (\d+)\n(.*?)(?=\n\n###|\n$)", text, re.DOTALL)}
        again = list(re.finditer(r"### passage (\d+) again\n(.*?)(?=\n\n###|\n$)", text, re.DOTALL))
        assert again
        for match in again:
            assert match[2] == first[match[1]][2]
            distances.append(match.start() - first[match[1]].start())
        notes = {m[1]: m for m in re.finditer(r"the number of the (.*) is (\d+)\n", text)}
        asked = list(re.finditer(r"what is the number of the (.*)\? (\d+)\n", text))
        assert asked
        for match in asked:
            assert match[2] == notes[match[1]][2]
            distances.append(match.start() - notes[match[1]].start())
    assert min(distances) > 0
    assert max(distances) > CHARACTERS / 2
    assert sum(distance > CHARACTERS / 8 for distance in distances) > len(distances) / 2


def test_the_same_arguments_give_the_same_documents(tmp_path: Path) -> None:
    few = ("--documents", "2", "--characters", "9000")
    first, second = make(tmp_path / "a", *few), make(tmp_path / "b", *few)
    assert first == second


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    done = run_app(app, "long-range", "-i", tmp_path, "-o", tmp_path / "out.jsonl", code=2)
    assert "passages" in done.output


def test_conversations_ask_for_notes_of_their_document(tmp_path: Path) -> None:
    for record in make(tmp_path, "--documents", "3", "--questions", "4", "--characters", "4000"):
        messages = record["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 4
        document = messages[0]["content"]
        assert 4000 <= len(document) < 8000
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            name = re.search(r"what is the number of the (.*)\?$", question["content"])
            assert name is not None
            assert f"\n### note\nthe number of the {name[1]} is {answer['content']}\n" in document


def test_trajectories_read_the_same_document_by_calls(tmp_path: Path) -> None:
    few = ("--documents", "2", "--questions", "2", "--characters", "4000")
    given = make(tmp_path / "given", *few)
    for whole, record in zip(given, make(tmp_path / "read", *few, "--reads", "5"), strict=True):
        messages = record["messages"]
        roles = ["user", *["assistant", "tool"] * 5, "assistant", "user", "assistant"]
        assert [message["role"] for message in messages] == roles
        document = "".join(message["content"] for message in messages if message["role"] == "tool")
        assert f"{document}\n{messages[0]['content']}" == whole["messages"][0]["content"]
        calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
        assert calls == [{"name": "read", "arguments": {"part": part}} for part in range(5)]
        assert [message["content"] for message in messages[11:]] == [m["content"] for m in whole["messages"][1:]]
        assert record["tools"][0]["function"]["name"] == "read"
    (tmp_path / "in.txt").write_text("a" * 2000)
    command = ["long-range", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl"), "--reads", "2"]
    assert "without --questions" in CliRunner().invoke(app, command).output
