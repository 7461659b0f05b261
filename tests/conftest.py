"""Settings of the test process: one thread, because tests are many small computations and run in parallel."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what scripts and launchers of earlier tests in this process set."""
    torch.set_num_threads(1)
