import pytest
from hub_server import hub_to_use

from diff_dalle.storage import retries


@pytest.fixture
def fast_retries(monkeypatch):
    """Seconds become fractions, and servers that other tests lost are forgotten."""
    for name, seconds in (("RETRY_SECONDS", 1.0), ("FIRST_PAUSE", 0.005), ("LONGEST_PAUSE", 0.05)):
        monkeypatch.setattr(retries, name, seconds)
    monkeypatch.setattr(retries, "_lost", set())


@pytest.fixture
def hub(monkeypatch, fast_retries, tmp_path):
    """A hub, to which huggingface_hub is logged in."""
    with hub_to_use(monkeypatch, tmp_path / "hub cache") as server:
        yield server


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """wandb sends nothing."""
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DATA_DIR", str(tmp_path / "data"))):
        monkeypatch.setenv(f"WANDB_{name}", value)
