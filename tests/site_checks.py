"""The docs site, called by `.ci/run site`: it builds, its links and images lead somewhere, nothing comes from another
host, and a page that is broken stops the build."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.forked_program import run_forked
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
    """Build the site of the repository at `root`, warnings being errors."""
    options = ["-q", "-W", "--keep-going", "-c", str(root / "docs"), str(root), str(site)]
    return run_forked([sys.executable, "-m", "sphinx.__main__", *options])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {file: Html(file) for file in site.rglob("*.html")}


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
    home = site / "docs" / "index.html"
    linked = {target for page, _, target, _ in internal(pages) if page == home}
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb"), *ROOT.glob("*.md")]
    documents += [*(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "experiments").glob("*.md")]
    for document in documents:
        page = site / document.relative_to(ROOT).with_suffix(".html")
        assert page == home or page in linked, document


def test_the_address_of_the_site_leads_to_its_first_page(site: Path, pages: dict[Path, Html]) -> None:
    assert [address for _, _, address in pages[site / "index.html"].addresses] == ["docs/index.html"]


def test_logs_are_not_searched(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert "Recipe keys" in index or "Configuration reference" in index
    assert "Performance log" not in index


def test_result_files_can_be_read_on_the_site(site: Path, pages: dict[Path, Html]) -> None:
    name = "attention-h200.json"
    copies = {target for _, _, target, _ in internal(pages) if target.name == name}
    assert {copy.read_bytes() for copy in copies} == {(ROOT / "benchmarks" / "results" / name).read_bytes()}


def test_the_notebook_is_a_page_with_its_outputs(site: Path, pages: dict[Path, Html]) -> None:
    notebook = site / "docs" / "tutorials" / "first_hour.html"
    assert "tensors are equal" in pages[notebook].text
    assert len({target for page, _, target, _ in internal(pages) if page == notebook and target.suffix == ".png"}) == 2


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Html]) -> None:
    for page, html in pages.items():
        for tag, name, address in html.addresses:
            if (tag, name) in LOADED:
                assert not urlsplit(address).netloc, f"{page}: <{tag}> {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_a_broken_page_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", tmp_path / "docs")
    shutil.copytree(ROOT / "docs" / "site", tmp_path / "docs" / "site")
    index = "# Home\n\n```{toctree}\nstages\n```\n"
    (tmp_path / "docs" / "index.md").write_text(index)
    stages = tmp_path / "docs" / "stages.md"
    stages.write_text("# Stages\n\n[home](index.md#home) [file](conf.py)\n")
    (tmp_path / "docs" / "unlisted.md").write_text("# A page that no table of contents lists\n")
    with stages.open("a") as page:
        page.write("\n[a](gone.md) [b](index.md#gone) [c](#lost) [d](results/gone.json) ![e](gone.png)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    for told in ("gone.md", "'gone'", "'lost'", "gone.json", "gone.png", "unlisted.md"):
        assert told in built.stdout, f"{told} in\n{built.stdout}"
