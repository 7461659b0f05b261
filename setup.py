from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="diff_dalle",
    version="0.1.0",
    description="Text-to-image diffusion models, trained from scratch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["diff_dalle", "diff_dalle.*"]),
    package_data={
        "diff_dalle": ["py.typed"],
        "diff_dalle.presets": ["*.yaml"],
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
        "ftfy",
        "regex",
        "tqdm",
        "pillow>=10.0",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "s3": ["boto3"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "hub": ["huggingface_hub"],
        "clip": ["open_clip_torch>=2.30"],
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
            "tensorboard",
            "wandb",
            "huggingface_hub",
        ],
    },
)
