import pytest
from file_server import serving

from diff_dalle.storage import retries


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch):
    """Seconds become milliseconds, and servers that other tests lost are forgotten."""
    for name, seconds in (
        ("RETRY_SECONDS", 1.0),
        ("FIRST_PAUSE", 0.005),
        ("LONGEST_PAUSE", 0.05),
        ("NOTED_SECONDS", 0.1),
    ):
        monkeypatch.setattr(retries, name, seconds)
    for name in ("_lost", "_noted"):
        monkeypatch.setattr(retries, name, set())


@pytest.fixture
def server():
    with serving() as server:
        yield server
