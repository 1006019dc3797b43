"""Runs the clients that are programs, as a user types them."""

import os
import pathlib
import subprocess
import sys

# Short enough that the longest document of the tasks is scored in windows.
MAX_MODEL_LEN = 256


def run_program(*words: str, folder: pathlib.Path, timeout: float = 800.0) -> str:
    """Run a program of this environment in `folder` and return what it wrote; fail with that if it fails."""
    program = pathlib.Path(sys.executable).with_name(words[0])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [str(program), *words[1:]],
        cwd=folder,
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
