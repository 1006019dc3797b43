"""Logging for the package: one handler on the `vllm` logger, and lines that are said once."""

import functools
import logging
import sys

from vllm import envs


@functools.cache
def _configure_root() -> None:
    root = logging.getLogger("vllm")
    if root.handlers:  # the application has its own ideas
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(envs.logging_level().upper())
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """Return the logger of module `name`; the package's handler is set up at the first call."""
    _configure_root()
    return logging.getLogger(name)


@functools.lru_cache(maxsize=1024)
def log_once(logger_name: str, level: int, message: str) -> None:
    """Log `message` at `level` the first time it is asked for in this process."""
    logging.getLogger(logger_name).log(level, message)
