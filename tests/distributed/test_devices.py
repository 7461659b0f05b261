"""Devices of processes, the arithmetic of their kernels, and the memory of the host."""

import os
import subprocess
import sys

import pytest
import torch

from diff_dalle.distributed import devices
from diff_dalle.distributed.devices import use_device
from diff_dalle.distributed.launch import DistributedConfig, launch
from diff_dalle.sampling.classifier import load_classifier
from diff_dalle.sampling.stages import load_stages


def switches():
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark


@pytest.fixture
def otherwise():
    """Every switch is set the other way, and set back afterwards."""
    before = switches()
    _set("high", True, False)
    yield
    _set(*before)


def _set(precision, allow_tf32, benchmark):
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = allow_tf32, benchmark


def test_a_job_decides_the_arithmetic_of_cuda_kernels(otherwise):
    with launch(DistributedConfig(device="cpu")):
        assert switches() == ("highest", False, True) and not torch.backends.cuda.matmul.allow_tf32


def test_a_job_may_choose_tf32_for_all_that_it_loads(otherwise, monkeypatch):
    """On CUDA devices alone, and no job before it has a say."""
    for allowed in (True, False):
        with launch(DistributedConfig(device="cpu", allow_tf32=allowed)):
            assert switches() == ("highest", False, True)
            monkeypatch.setattr(devices, "pick_device", lambda name, place: torch.device(name))
            use_device("cuda")
            assert switches() == (("high", True, True) if allowed else ("highest", False, True))


def test_a_library_user_gets_the_same_arithmetic(otherwise, monkeypatch):
    """Loading a generator or a classifier sets it too."""
    for name, load in (("stages.open_networks", load_stages), ("classifier.open_networks", load_classifier)):
        _set("high", True, False)
        monkeypatch.setattr(f"diff_dalle.sampling.{name}", lambda *arguments: None)
        with pytest.raises((AttributeError, TypeError)):  # the file's content, which is None
            load("file", "cpu", "fp32")
        assert switches() == ("highest", False, True)


def test_the_device_is_the_one_that_is_named():
    assert use_device("cpu") == torch.device("cpu")


def test_building_without_values_and_updating_need_no_compiler():
    """Importing it takes a second of every start."""
    code = """
import sys, torch
from diff_dalle.distributed.devices import with_memory, without_values
with without_values():
    table = torch.nn.Embedding(4, 8, padding_idx=0)
    torch.nn.init.kaiming_normal_(table.weight)
    layer = torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    values = torch.zeros(3, device="cpu").normal_()
print(table.weight.is_meta, layer.weight.is_meta, bool(values.any()))
strides = layer.weight.stride()
layer = with_memory(layer, "cpu")
print(layer.weight.is_cpu, isinstance(layer.weight, torch.nn.Parameter), layer.weight.stride() == strides)
from diff_dalle.training.optim import OptimConfig, build_optimizer
optimizer = build_optimizer(OptimConfig(), layer)
layer(torch.ones(1, 8, 3, 3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "True True True\nTrue True True\n[]\n", result.stderr


# -------------------------------------------------------------------------------------------------- memory of the host


# Counts the pages that the kernel hands out while a block of 16 MiB is allocated and freed again and again.
FAULTS = """
import resource
from diff_dalle.distributed.devices import reuse_freed_memory
for reuse in (False, True):
    assert not reuse or reuse_freed_memory()
    bytearray(16 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10): bytearray(16 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, ValueError):
        return False


@pytest.mark.skipif(not is_glibc(), reason="needs glibc")
def test_freed_memory_is_reused_without_asking_the_kernel_again():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    plain, reused = map(int, result.stdout.split())
    assert plain > 1000 and reused < 100


def test_settings_of_the_environment_are_kept(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not devices.reuse_freed_memory()


def test_every_job_begins_with_it(monkeypatch):
    called = []
    monkeypatch.setattr(devices, "reuse_freed_memory", lambda: called.append(True))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    with launch(DistributedConfig(device="cpu")):
        assert called
