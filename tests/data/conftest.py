import pytest

from diff_dalle.storage import retries


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Copies and indexes of one test are no other's, and nobody waits long for a server that is away."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
