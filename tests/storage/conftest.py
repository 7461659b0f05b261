import pytest
from file_server import serving

from diff_dalle.storage import objects, retries


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


@pytest.fixture
def s3_at(monkeypatch):
    """``s3_at(URL)`` makes a server that of s3://."""
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "key"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def use(endpoint: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects._client_of.cache_clear()

    yield use
    objects._client_of.cache_clear()
