"""A wheel holds the commands too: ``scripts/`` becomes ``diff_dalle/scripts``, without what needs ``tests/``."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
OF_CHECKOUTS = {"benchmark.py", "drill.py", "readme_flags.py", "with_tests.py"}


class WithScripts(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return  # they are beside the package
        folder = Path(self.build_lib) / "diff_dalle" / "scripts"
        folder.mkdir(exist_ok=True)
        for script in sorted((ROOT / "scripts").glob("*.py")):
            if script.name not in OF_CHECKOUTS:
                shutil.copy(script, folder)


setup(
    name="diff_dalle",
    version="0.1.0",
    description="Text-to-image diffusion models, trained from scratch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    cmdclass={"build_py": WithScripts},
    entry_points={"console_scripts": ["diff-dalle = diff_dalle.__main__:main"]},
    packages=find_packages(include=["diff_dalle", "diff_dalle.*"]),
    package_data={
        "diff_dalle": ["py.typed", "*.pyi"],
        "diff_dalle.commands": ["*.txt"],
        "diff_dalle.checkpoints.foreign": ["*.yaml"],
        "diff_dalle.presets": ["*.yaml", "*.json"],
        "diff_dalle.trained": ["*/*"],
        "diff_dalle.text": ["*.txt", "*.LICENSE"],
    },
    install_requires=[
        "torch>=2.6,<2.14",
        "mpi4py>=4.0",
        "mpich; sys_platform == 'linux' or (sys_platform == 'darwin' and platform_machine == 'arm64')",
        "numpy",
        "blobfile>=3.0",
        "urllib3>=2.2",  # which blobfile brings
        "webdataset>=1.0",
        "braceexpand",
        "PyYAML",
        "typing_extensions",  # which torch brings
        "ftfy",
        "regex",
        "tqdm",
        "pillow>=10.0",
        "safetensors",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "completion": ["argcomplete"],
        "jpeg": ["simplejpeg"],
        "heic": ["pillow-heif>=1.0"],
        "emoji": ["emoji>=2.10"],
        "s3": ["boto3"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "hub": ["huggingface_hub"],
        "clip": ["open_clip_torch>=2.30"],
        "vision": ["torchvision"],
        "faces": ["insightface>=0.7", "onnxruntime"],
        "saliency": ["opencv-contrib-python-headless"],
        "eval": ["torchmetrics>=1.6", "torch-fidelity", "torchvision"],
        "web": ["gradio>=6"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "matplotlib",
            "ruff",
            "mypy",
            "types-PyYAML",
            "types-regex",
            "types-tqdm",
            "boto3",
            "moto[server]",
            "torchmetrics",
            "tensorboard",
            "wandb",
            "huggingface_hub",
            "simplejpeg",
            "pillow-heif",
            "emoji",
            "gradio",
            "playwright",
            "axe-playwright-python",
            "nbclient",
            "ipykernel",
            "argcomplete",
            "opencv-python-headless",  # the reference for edges
            "triton>=3.9; sys_platform == 'linux' and platform_machine == 'x86_64'",  # its interpreter, for kernels
            "diffusers>=0.42; python_version >= '3.11'",  # before, other versions of huggingface_hub are needed
        ],
    },
)
