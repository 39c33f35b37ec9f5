"""Limits that only fall: sizes of files and of the core, openings of docstrings, words that have a plainer one."""

import ast
import io
import re
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moba_train"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "configs" not in path.parts]
PROSE = [*FILES, *(path for part in ("data_tools", "integrations") for path in sorted((ROOT / part).rglob("*.py")))]
"""Files whose docstrings and comments are read."""
OPENINGS = re.compile(r"(What|Whether|How|Where|Who|Whose|When|Why|Which|Of|The same|See `)\b")
WORDS = re.compile(
    r"\b(mend(s|ed)?|whoever|nobody|so many|be it|besides|brought|anew"
    r"|t(old|ell|ells) apart|but for|in (the )?place of)\b|, too([.,;:)]|$)",
    re.IGNORECASE,
)
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "integrations").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""Pages that users read."""
PAGE_WORDS = re.compile(WORDS.pattern + r"|\bof (its|their) own\b|\bbeside\b|\bcannot be told\b|[<>]{7}", re.IGNORECASE)
"""The words, and what a conflict of a merge leaves."""
MOST_WORDS = 35
"""Most words of a sentence on a page."""
MOST_FAULTS = 0
"""Most words and sentences on all pages that could be plainer."""
MOST_CELL_WORDS = 12
"""Most words of a table's cell on a page; code is one word."""
MOST_LONG_CELLS = 8
"""Most cells that are longer. Pages made from options and commands do not count."""
MOST_CORE_LINES = 34_000
"""Most lines of the core that are not comments, of which there cannot be too many."""
MOST_LINES = 500
"""Most lines of a file."""


@cache
def written(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(line, text) of every docstring, those of attributes included, and of every comment."""
    return [*docstrings(path)], [*comments(path)]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def is_core(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] not in ("mechanisms", "tools")


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_noun_or_a_verb_in_the_words_of_the_field(path: Path) -> None:
    strings, remarks = written(path)
    assert [(line, text.splitlines()[0]) for line, text in strings if OPENINGS.match(text)] == []
    prose = [(line, " ".join(text.split())) for line, text in strings + remarks]
    words = [(line, found[0]) for line, text in prose for found in WORDS.finditer(text)]
    assert words == []


def test_what_mypy_ignores_has_its_reason() -> None:
    ignored = [(path.name, line, text) for path in PROSE for line, text in comments(path) if "type: ignore" in text]
    assert len(ignored) > 10
    assert [place for place in ignored if not re.search(r"ignore\[[\w, -]+\]  # \w", place[2])] == []


def prose(page: Path) -> str:
    """The text of a page without code, links' addresses and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and items, without headings and tables."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not paragraph.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def faults(page: Path) -> list[str]:
    """Words that have a plainer one, with some text around them, and long sentences."""
    text = prose(page)
    flat = " ".join(text.split())
    words = [flat[max(0, found.start() - 40) : found.end() + 20] for found in PAGE_WORDS.finditer(flat)]
    return words + [sentence for sentence in sentences(text) if len(sentence.split()) > MOST_WORDS]


def test_pages_are_in_plain_words_and_short_sentences() -> None:
    found = {str(page.relative_to(ROOT)): faults(page) for page in PAGES}
    begun_with = [name for name in found if name.startswith(("README", "docs/index", "docs/tutorials"))]
    assert {name: found[name] for name in begun_with if found[name]} == {}
    assert sum(map(len, found.values())) <= MOST_FAULTS, found


def test_cells_of_tables_are_short() -> None:
    pages = (page for page in PAGES if page.name not in ("config.md", "cli.md"))
    rows = ((page.name, line) for page in pages for line in prose(page).splitlines() if line.startswith("|"))
    cells = [(name, cell.strip()) for name, row in rows for cell in re.sub(r"`[^`]*`", "`code`", row).split("|")]
    assert len(cells) > 2000
    long = [cell for cell in cells if len(cell[1].split()) > MOST_CELL_WORDS]
    assert len(long) <= MOST_LONG_CELLS, long


def test_a_file_is_one_whole_idea() -> None:
    sizes = {path: len(lines(path)) for path in FILES if path.name != "__init__.py"}
    assert [path for path, size in sizes.items() if size > MOST_LINES] == []
    assert 150 <= statistics.median(sizes.values()) <= 220


def test_the_core_is_small_enough_to_be_held() -> None:
    core = [line for path in FILES if is_core(path) for line in lines(path)]
    assert sum(not line.lstrip().startswith("#") for line in core) <= MOST_CORE_LINES


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of the repository's files")
def test_the_files_that_docstrings_and_comments_name_are_there() -> None:
    """`kernels/table.py` or table.py, how-to/data.md, kernels-h200.json: a file of the repository ends so."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    ends = {path[at:] for path in listed for at in (0, *(found.end() for found in re.finditer("/", path)))}
    named = re.compile(r"(?<![\w/.])(?:\.\./)*([\w/-]+\.(?:py|md)|[\w/-]+-h[12]00[\w-]*\.json)\b")
    prose = [(path, line, text) for path in PROSE for part in written(path) for line, text in part]
    found = [(path.name, line, name[1]) for path, line, text in prose for name in named.finditer(text)]
    assert len(found) > 100
    assert [place for place in found if place[2] not in ends] == [], "moved, or renamed?"
