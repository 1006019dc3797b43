"""What this machine is: the only place that asks for CUDA, counts threads or looks for bfloat16 units.

torch is imported inside the functions that need it, so that the front end can import this file.
"""

import functools
import os
import pathlib
from collections.abc import MutableMapping

from vllm import envs


def resolve_device(device: str) -> str:
    """Return the torch device string for `device`; "auto" is CUDA where there is one, else the CPU."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def guess_device(device: str) -> str:
    """Return what `resolve_device` most likely answers, without loading torch: good enough for a default."""
    if device != "auto":
        return device
    return "cuda" if pathlib.Path("/proc/driver/nvidia/version").exists() else "cpu"


@functools.cache
def get_cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as Linux names them; empty where they can't be read."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def has_fast_dtype(dtype: str, device: str) -> bool:
    """Say whether `device` computes products of `dtype` at least as fast as those of float32."""
    if dtype == "float32" or device != "cpu":
        return True
    units = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "fphp"}}
    return bool(units[dtype] & get_cpu_flags())


def _parse_cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _get_cgroup_cpus() -> float | None:
    """Return the CPU quota of this process's cgroup in CPUs; None where there is none."""
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = pathlib.Path("/sys/fs/cgroup/cpu")
        micros = int((base / "cpu.cfs_quota_us").read_text())
        return None if micros <= 0 else micros / int((base / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def choose_num_threads() -> int:
    """Return how many threads compute: affinity mask ∩ cgroup quota, unless the environment says otherwise.

    OMP_NUM_THREADS wins; then VLLM_CPU_OMP_THREADS_BIND (such as "0-3,6"; the process is bound to those cores).

    Raises:
        ValueError: VLLM_CPU_OMP_THREADS_BIND names no usable core.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    bind = envs.cpu_omp_threads_bind()
    if bind not in ("auto", "all", "nobind"):
        try:
            cores = _parse_cpu_list(bind) & allowed
        except ValueError:
            cores = set()
        if not cores:
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND must name cores of this process, such as 0-1; got {bind!r} "
                f"(allowed here: {sorted(allowed)})"
            )
        os.sched_setaffinity(0, cores)
        return len(cores)
    quota = _get_cgroup_cpus()
    return max(1, len(allowed) if quota is None else min(len(allowed), round(quota)))


def get_available_memory() -> int:
    """Return the bytes of memory that this process may still take (machine and cgroup)."""
    available = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = [int(line.split()[1]) * 1024]
    except OSError:
        pass
    try:
        base = pathlib.Path("/sys/fs/cgroup")
        limit = (base / "memory.max").read_text().strip()
        if limit != "max":
            available.append(max(0, int(limit) - int((base / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(available)


def get_total_memory() -> int:
    """Return the bytes of memory that this process could ever take (machine and cgroup)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def get_resident_memory() -> int:
    """Return the bytes of memory that this process holds; 0 where Linux doesn't say."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# How often a thread of libgomp that waits looks again before it sleeps. The default is some milliseconds, all through
# what the front end has to do between two steps: on two cores that is its core. A thousand looks (10 to 50 µs) bridge
# the gap between two parallel regions of one step, so that threads don't have to be woken for each.
OPENMP_SPIN_COUNT = "1000"


def bound_openmp_spinning(environment: MutableMapping[str, str]) -> None:
    """Set the bound for an OpenMP runtime that starts in `environment`, unless the user has set his own.

    Beside another busy process on two cores a step of 32 rows took 0.9 s without the bound and 0.2 s with it: a thread
    that spins keeps the one that it waits for from running.
    """
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environment["GOMP_SPINCOUNT"] = OPENMP_SPIN_COUNT
