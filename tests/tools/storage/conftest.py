"""The S3 server of these tests."""

from collections.abc import Iterator

import pytest

from moba_train.tools.storage import upload
from tests.tools.storage.server import Line, s3_server


@pytest.fixture(scope="package")
def server() -> Iterator[Line]:
    pytest.importorskip("s3fs")
    with s3_server() as line:
        yield line


@pytest.fixture
def line(server: Line, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The line to the server, in order; uploads try again at once."""
    monkeypatch.setattr(upload, "PAUSES_S", (0.0, 0.0))
    server.is_full = False
    server.bytes_per_s = server.torn = 0
    server.puts.clear()
    return server
