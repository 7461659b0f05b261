"""Settings of the test process: one thread, because tests are many small computations and run in parallel; Triton
without a GPU."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which then runs kernels in its interpreter


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, except by --slow and where a test is named."""
    if config.getoption("slow") or any("::" in str(each) for each in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers():
    """Half as many again as there are cores, because many tests wait: for processes, servers and time-outs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what scripts and launchers of earlier tests in this process set."""
    torch.set_num_threads(1)
