"""Packaging of torchbearer_ddp; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(
    r'^__version__ = "(.+)"', (here / "torchbearer_ddp" / "version.py").read_text(), re.MULTILINE
)[1]

setup(
    name="torchbearer_ddp",
    version=version,
    description="Data-parallel training for torchbearer: more cores, GPUs, machines, or Slurm",
    long_description=(here / "README.rst").read_text(),
    long_description_content_type="text/x-rst",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["torchbearer_ddp", "torchbearer_ddp.*"]),
    package_data={"torchbearer_ddp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.10",
        "torchbearer>=0.5.5",
        "submitit>=1.5.4,<1.6",
        "tensorboardX>=2.6.5",
        "cloudpickle>=3",
        "numpy",
        "packaging",  # torchbearer imports it without declaring it
        "tqdm",
    ],
    extras_require={
        "examples": ["mlxtend>=0.23", "tensorboard"],
        "test": [
            "hypothesis",
            "ipykernel",
            "ipywidgets",
            "mlxtend>=0.23",
            "mypy",
            "nbclient",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "safetensors",
            "scikit-learn",
            "tensorboard",
            "torchdata>=0.11",
        ],
        # Coverage-guided, for make fuzz; it has no wheels for every Python.
        "fuzz": ["atheris>=3"],
        "docs": ["furo", "sphinx>=7", "sphinx-copybutton"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
