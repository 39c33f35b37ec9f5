"""The docs site: it builds, its links and images lead somewhere, nothing comes from another host, and a page that is
broken stops the build."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.guide import ROOT

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class Html(HTMLParser):
    """The addresses that a page of the site names, the ids that links may name after `#`, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.addresses: list[tuple[str, str, str]] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.append((tag, name, value))
            elif name in ("id", "name") and value:
                self.ids.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the repository at `root` as CI does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / ".ci" / "mkdocs.yml"), "-d", str(site)],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    """Every page but 404.html, whose links begin at the root of a server."""
    return {file: Html(file) for file in site.rglob("*.html") if file.name != "404.html"}


def internal(pages: dict[Path, Html]) -> Iterator[tuple[Path, str, Path, str]]:
    """Every address inside the site: the page that names it, how, the file that it leads to, and the anchor in it."""
    for page, html in pages.items():
        for _, _, address in html.addresses:
            parts = urlsplit(address)
            if not parts.scheme and not parts.netloc:
                target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
                yield page, address, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def test_tables_are_tables(pages: dict[Path, Html]) -> None:
    """Markdown in HTML, such as what folds open, is read as Markdown only where it says so."""
    for page, html in pages.items():
        assert "| --- |" not in html.text, page


def test_links_and_images_lead_somewhere(pages: dict[Path, Html]) -> None:
    seen = 0
    for page, address, target, anchor in internal(pages):
        assert target.is_file(), f"{page}: {address}"
        if anchor and target in pages:
            assert anchor in pages[target].ids, f"{page}: {address}"
        seen += 1
    assert seen > 1000


def test_every_document_is_a_page_in_the_navigation(site: Path, pages: dict[Path, Html]) -> None:
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")]
    linked = {target for page, _, target, _ in internal(pages) if page == site / "index.html"}
    for document in documents:
        assert site / "docs" / document.stem / "index.html" in linked, document.name
    measured = {"benchmarks", "benchmarks/LOG", "benchmarks/RESULTS", "experiments", "experiments/REPORT"}
    assert {site / name / "index.html" for name in measured | {"CHANGELOG", "CONTRIBUTING", "SECURITY"}} <= linked


def test_result_files_can_be_read_on_the_site(site: Path) -> None:
    name = "benchmarks/results/attention-h200.json"
    assert (site / name).read_bytes() == (ROOT / name).read_bytes()
    assert "attention-h200.json" in (site / "benchmarks" / "results" / "index.html").read_text()


def test_the_notebook_is_a_page_with_its_outputs(site: Path, pages: dict[Path, Html]) -> None:
    notebook = site / "docs" / "first_hour" / "index.html"
    assert "tensors are equal" in pages[notebook].text
    plots = {
        target for page, _, target, _ in internal(pages) if page == notebook and target.name.startswith("first_hour-")
    }
    assert len(plots) == 2


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Html]) -> None:
    for page, html in pages.items():
        for tag, name, address in html.addresses:
            if (tag, name) in LOADED:
                assert not urlsplit(address).netloc, f"{page}: <{tag}> {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_a_broken_page_stops_the_build(tmp_path: Path) -> None:
    for name in (".ci", "docs", "benchmarks", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs" / "unlisted.md").write_text("# A page that README does not list\n")
    broken = "\n[a](gone.md) [b](data.md#gone) [c](#gone) [d](../benchmarks/results/gone.json) ![e](gone.png)\n"
    with (tmp_path / "docs" / "stages.md").open("a") as page:
        page.write(broken)
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    for told in ("gone.md", "data.md#gone", "'#gone'", "gone.json", "gone.png", "docs/unlisted.md"):
        assert told in built.stderr, f"{told} in\n{built.stderr}"
