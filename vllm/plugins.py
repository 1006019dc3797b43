"""Plugins: functions that installed packages want called at start-up, in each process of the engine, as in vLLM.

A package names them as entry points of the group `vllm.general_plugins`; what they do is theirs, such as
`ModelRegistry.register_model(…)`.
"""

import functools
import importlib.metadata

from vllm import envs
from vllm.logger import init_logger

GROUP = "vllm.general_plugins"

logger = init_logger(__name__)


@functools.cache  # once a process
def load_general_plugins() -> None:
    """Call each plugin, or those that VLLM_PLUGINS names; one that fails is logged and the others are called."""
    allowed = envs.plugins()
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        if allowed is not None and entry_point.name not in allowed:
            continue
        try:
            entry_point.load()()
        except Exception:
            logger.exception("plugin %s (%s) failed", entry_point.name, entry_point.value)
