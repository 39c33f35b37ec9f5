"""The messages that docs/how-to/troubleshooting.md quotes are in the code."""

import ast
import re
from functools import cache

import pytest

from tests.guide import ROOT

ROWS = [line for line in (ROOT / "docs/how-to/troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
MESSAGES = [re.findall(r"^\| `([^`]+)`( \(\w+\))? \|", row)[0] for row in ROWS]
OWN = [message for message, source in MESSAGES if not source]


@cache
def strings() -> str:
    """Every string of the programs, values that are filled in replaced by a line break."""
    found = []
    for path in (*(ROOT / "moba_train").rglob("*.py"), *(ROOT / "data_tools").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


@pytest.mark.parametrize("message", OWN)
def test_a_message_is_in_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("...")]
    parts = [part for part in parts if re.search(r"\w{2}", part)]
    assert max(map(len, parts)) >= 10, "too little to be found"
    assert [part for part in parts if part not in strings()] == []


def test_the_page_has_the_messages_of_torch_and_at_least_25_of_ours() -> None:
    assert len(OWN) >= 25
    assert {source.strip(" ()") for _, source in MESSAGES if source} == {"torch", "NCCL"}
