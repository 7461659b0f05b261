import pytest
from hub_server import hub_to_use

from diff_dalle.storage import retries


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 1.0)
    monkeypatch.setattr(retries, "_lost", set())
    with hub_to_use(monkeypatch, tmp_path / "cache") as server:
        yield server
