import subprocess
import sys

import pytest

import diff_dalle


@pytest.mark.parametrize("name", diff_dalle.__all__)
def test_everything_announced_can_be_imported(name):
    assert getattr(diff_dalle, name) is not None


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="lod"):
        diff_dalle.lod  # noqa: B018


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, diff_dalle; diff_dalle.Pipeline; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = {"mpi4py", "webdataset", "wandb", "tensorboard", "blobfile", "boto3", "torchmetrics", "torchvision"}
    assert not unwanted & set(loaded)
