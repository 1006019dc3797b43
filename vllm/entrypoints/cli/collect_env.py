"""Describe this machine and what is installed, for a bug report; keys and tokens are not shown."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from typing import Any

import vllm
from vllm import platforms

_PREFIXES = ("VLLM_", "OMP_", "MKL_", "KMP_", "CUDA_", "HF_", "NVIDIA_VISIBLE")
_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM")
# Asked in a process of its own: what torch says when it can't be loaded is a part of the answer.
_ASK_TORCH = """
import json, torch
from vllm.ops import api as ops
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "CUDA it was built for": torch.version.cuda,
    "CUDA available": torch.cuda.is_available(),
    "devices": ", ".join(devices) or "none",
    "threads": torch.get_num_threads(),
    "our compiled kernels": ops.is_compiled(),
}))
"""
_SECRET = re.compile(r"KEY|TOKEN$|SECRET|PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    found = collect()
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for title, values in found.items():
        print(f"{title}\n{'-' * len(title)}")
        for name, value in values.items():
            print(f"{name:<24}: {value}")
        print()
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return what is known, by title and name."""
    return {
        "vllm": {
            "version": vllm.__version__,
            "where": str(pathlib.Path(vllm.__file__).parent),
        },
        "system": {
            "platform": platform.platform(),
            "python": sys.version.replace("\n", " "),
            "libc": " ".join(platform.libc_ver()),
            "compiler": _first_line("c++", "--version"),
            "cmake": _first_line("cmake", "--version"),
        },
        "processor": {
            "model": _read_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
            "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
            "instruction sets": " ".join(sorted(flag for flag in platforms.get_cpu_flags() if _is_vector(flag))),
            "memory": _read_field("/proc/meminfo", "MemTotal"),
            "memory, available": _read_field("/proc/meminfo", "MemAvailable"),
        },
        "torch": {
            **_ask_torch(),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        },
        "packages": _find_packages(),
        "environment": _find_environment(),
    }


def _ask_torch() -> dict[str, Any]:
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"can't be loaded": next(iter(asked.stderr.splitlines()[-1:]), f"exit status {asked.returncode}")}
    return found


def _find_packages() -> dict[str, str]:
    """Return the versions of what this package needs, and what of it is missing."""
    found = {}
    for requirement in importlib.metadata.requires("vllm") or ():
        name = re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0]
        if "extra ==" in requirement:
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _find_environment() -> dict[str, str]:
    """Return the variables that change what we do; of a secret only that it is set."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: "(set)" if _SECRET.search(name) else os.environ[name] for name in names}


def _is_vector(flag: str) -> bool:
    return flag.startswith(("avx", "amx", "f16c", "fma", "sse4", "neon", "asimd", "sve", "bf16", "i8mm"))


def _read_field(path: str, name: str) -> str | None:
    try:
        lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == name), None)


def _first_line(*command: str) -> str:
    """Return what a program says of itself, or that it is not there."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "does not answer"
    return next(iter(said.splitlines()), "")
