import os
import subprocess
import sys

import pytest
import torch

from diff_dalle.distributed import devices
from diff_dalle.distributed.launch import DistributedConfig, launch

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
