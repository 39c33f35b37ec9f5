"""The pages of the docs site: hooks that MkDocs calls. Pages keep their paths of the repository, so that links in
README and docs lead to the same places on the site as on GitHub:

    README.md, PROJECT, docs/*.md, benchmarks/*.md, experiments/*.md     pages
    docs/*.ipynb                               pages, with the outputs that the notebook holds
    every other file that a page links to      copied; a folder becomes a page that lists its files

Guides come in the order of README's "Guides, in reading order".
"""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
MEASURED = ("benchmarks", "experiments")
"""Folders whose pages say what was measured."""
PROJECT = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
LINK = re.compile(r"(?<=\]\()[\w./-]+")
TERMINAL_COLOURS = re.compile(r"\x1b\[[\d;]*m")
GUIDES = re.compile(r"^## Guides, in reading order$(.*?)^## ", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: README, the guides that it lists, what was measured, the project."""
    guides = GUIDES.search((ROOT / "README.md").read_text())
    if guides is None:
        raise PluginError("README.md: the section 'Guides, in reading order', which orders the site, is missing")
    pages = [_page_name(link) for link in LINK.findall(guides[1]) if link.startswith("docs/")]
    measured = [_path(page) for folder in MEASURED for page in _documents(folder, "*.md")]
    config.nav = [{"Overview": "README.md"}, {"Guides": pages}, {"Measured": measured}, {"Project": PROJECT}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages and all that these link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = [ROOT / name for name in ("README.md", *PROJECT)]
    pages += [page for folder in ("docs", *MEASURED) for page in _documents(folder, "*.md")]
    for path in pages:
        files.append(_from_repository(path, config))
    for path in _documents("docs", "*.ipynb"):
        _add_notebook(path, files, config)
        pages.append(path)
    for target in sorted({target for page in pages for target in _targets(page)} - set(pages)):
        if target.is_dir():
            _add_folder(target, files, config)
        else:
            files.append(_from_repository(target, config))
    files.append(File("mkdocs.css", str(ROOT / ".ci"), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to a folder or a notebook lead to its page."""

    def page_of(link: re.Match[str]) -> str:
        target = (ROOT / page.file.src_uri).parent / link[0]
        return f"{link[0].rstrip('/')}/index.md" if target.is_dir() else _page_name(link[0])

    return LINK.sub(page_of, markdown)


def _documents(folder: str, pattern: str) -> list[Path]:
    """Files of a folder of the repository."""
    return sorted((ROOT / folder).glob(pattern))


def _path(path: Path) -> str:
    """The path in the repository."""
    return path.relative_to(ROOT).as_posix()


def _page_name(link: str) -> str:
    """The page that a link to a file leads to: a notebook's is Markdown."""
    return re.sub(r"\.ipynb$", ".md", link)


def _from_repository(path: Path, config: MkDocsConfig) -> File:
    """A file of the repository: a page if it is Markdown, else copied as it is."""
    return File(_path(path), str(ROOT), config.site_dir, config.use_directory_urls)


def _targets(page: Path) -> Iterator[Path]:
    """Files and folders of the repository that a page links to. MkDocs reports links that lead nowhere."""
    for link in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        if target.exists() and target.is_relative_to(ROOT) and target != ROOT:
            yield target


def _add_folder(folder: Path, files: Files, config: MkDocsConfig) -> None:
    """Add a page that lists the files of a folder, and the files."""
    listed = sorted(path for path in folder.iterdir() if path.is_file())
    content = f"# {_path(folder)}\n\n" + "".join(f"- [{path.name}]({path.name})\n" for path in listed)
    uri = f"{_path(folder)}/index.md"
    files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    for path in listed:
        files.append(_from_repository(path, config))


def _add_notebook(path: Path, files: Files, config: MkDocsConfig) -> None:
    """Add a notebook as a page of cells, plots and printed text, its plots as files, and the notebook itself."""
    parts = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        language = "bash" if cell.source.startswith("%%bash") else "python"
        parts.append(f"```{language}\n{cell.source}\n```")
        plots = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        for plot, image in enumerate(plots):
            name = f"{path.stem}-{number}-{plot}.png"
            files.append(File.generated(config, f"{_path(path.parent)}/{name}", content=base64.b64decode(image)))
            parts.append(f"![A plot of the cell above]({name})")
        if text := "".join(output.text for output in cell.outputs if output.output_type == "stream"):
            parts.append(f'```{{.text title="Output"}}\n{TERMINAL_COLOURS.sub("", text).rstrip()}\n```')
    files.append(File.generated(config, _page_name(_path(path)), content="\n\n".join(parts)))
    files.append(_from_repository(path, config))
