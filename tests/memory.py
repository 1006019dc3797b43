"""How much memory a process holds for itself alone."""

import os
import pathlib

MIB = 1 << 20


def read_memory(pid: int | None = None) -> int:
    """Return a process's resident memory that it shares with nobody (of this process: None), in bytes."""
    lines = pathlib.Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
