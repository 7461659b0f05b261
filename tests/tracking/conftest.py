import pytest
from hub_server import serving_hub

from diff_dalle.storage import retries


@pytest.fixture
def fast_retries(monkeypatch):
    """Seconds become fractions, and servers that other tests lost are forgotten."""
    for name, seconds in (("RETRY_SECONDS", 1.0), ("FIRST_PAUSE", 0.005), ("LONGEST_PAUSE", 0.05)):
        monkeypatch.setattr(retries, name, seconds)
    monkeypatch.setattr(retries, "_lost", set())


@pytest.fixture
def hub(monkeypatch, fast_retries):
    """A hub, to which huggingface_hub is logged in."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield server
