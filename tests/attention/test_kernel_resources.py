"""The check of the page of kernels' resources; the compilations that it compares take minutes (`.ci/run kernels`)."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.attention import kernel_resources
from tests.attention.compiled_triton import KIBIBYTES, SHARED_LIMIT, kernels_at
from tests.attention.kernel_resources import PAGE, TARGETS, main


def test_the_check_names_the_rows_that_the_page_does_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text())
    own = PAGE.read_text().partition("<!-- Triton 3.6 -->\n\n")[2].partition("\n\n<!--")[0]
    assert len(own.splitlines()[0].split("|")) == len(TARGETS) + 3
    monkeypatch.setattr(kernel_resources, "PAGE", page)
    monkeypatch.setattr(kernel_resources.triton, "__version__", "3.6.0")
    monkeypatch.setattr(kernel_resources, "table", lambda: own)
    main(check=True)
    changed = own.replace("255 / 18 / 344", "255 / 18 / 512")
    monkeypatch.setattr(kernel_resources, "table", lambda: changed)
    with pytest.raises(SystemExit, match=r"it has other rows:\n\| `_select` \| 255 / 18 / 512"):
        main(check=True)
    assert page.read_text() == PAGE.read_text()
    main(check=False)
    assert "255 / 18 / 512" in page.read_text()


def test_the_page_of_resources_has_every_kernel_and_gpu() -> None:
    """After a change: python -m tests.attention.kernel_resources, with each Triton of the page."""
    kernels = {kernel.__name__ for size in (128, 4096) for kernel, _, _ in kernels_at(128, size, SHARED_LIMIT)}
    tables = PAGE.read_text().split("<!-- Triton ")[1:]
    assert [text[:3] for text in tables] == ["3.6", "3.9"]
    for text in tables:
        assert kernels <= {*re.findall(r"^\| `(\w+)` \| \d+ / \d+ / \d+ \|", text, re.MULTILINE)}
        assert all(f" sm_{architecture} |" in text for architecture in KIBIBYTES)
