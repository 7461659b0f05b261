import subprocess
import sys
from pathlib import Path

import pytest

import diff_dalle


def test_every_public_name_can_be_imported():
    assert all(getattr(diff_dalle, name) is not None for name in diff_dalle.__all__)


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="lod"):
        diff_dalle.lod  # noqa: B018


def test_type_checkers_find_the_annotations():
    assert Path(diff_dalle.__file__).with_name("py.typed").exists()


def test_importing_the_package_loads_no_optional_package():
    """And none that takes long or requires MPI; the mathematics none but torch and numpy."""
    mathematics = "import sys, diff_dalle.diffusion.sampling; assert 'PIL' not in sys.modules"
    code = f"{mathematics}; diff_dalle.Pipeline; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    optional = {"mpi4py", "webdataset", "wandb", "tensorboard", "blobfile", "boto3", "matplotlib"}
    filters = {"cv2", "kornia", "onnxruntime", "torchvision"}
    assert not (optional | filters) & set(loaded) and "diff_dalle.images.control_filters.table" in loaded
