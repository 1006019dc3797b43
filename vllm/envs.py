"""Every environment variable that the engine reads, each with its default, looked up when it is used.

VLLM_MAX_N_SEQUENCES            16384   the largest n
VLLM_MAX_LOGPROB_ENTRIES        50000000  the most logprob entries one request's answer may hold
VLLM_MAX_COMPLETION_PROMPTS     1024    prompts in one completions request
VLLM_MAX_STOP_STRINGS           4       stop strings over HTTP
VLLM_MAX_NUM_BAD_WORDS          128     bad words after tokenisation
VLLM_ENABLE_V1_MULTIPROCESSING  0       1: LLM runs the core in a process of its own
VLLM_ENGINE_READY_TIMEOUT_S     600     seconds that a core process may take to load the model
VLLM_V1_OUTPUT_PROC_CHUNK_SIZE  128     sequences whose outputs AsyncLLM handles before it lets others run
VLLM_CPU_KVCACHE_SPACE          unset   GiB of KV cache on a CPU
VLLM_CPU_OMP_THREADS_BIND       auto    cores to bind to, such as 0-1
VLLM_LOGGING_LEVEL              INFO
VLLM_CACHE_ROOT                 ~/.cache/vllm
VLLM_BATCH_INVARIANT            0       1: values repeat bit for bit whatever else runs (batch_invariant)
VLLM_PLUGINS                    unset   names of plugins to load, with commas between; unset: all, empty: none
VLLM_API_KEY                    unset   a key that the server asks for, besides --api-key
VLLM_SERVER_DEV_MODE            0       1: the server has a developer's switches (sleep, reset_prefix_cache, …)
VLLM_HTTP_TIMEOUT_KEEP_ALIVE    5       seconds that an idle connection stays open
VLLM_KEEP_ALIVE_ON_ENGINE_DEATH 0       1: the server answers 503 after the engine died, instead of ending
VLLM_LOG_STATS_INTERVAL         10      seconds between two lines of the server's statistics
OPENAI_API_KEY                  unset   the key that our own clients send: bench serve, chat, complete
"""

import os
from collections.abc import Callable


def _int(name: str, default: int) -> Callable[[], int]:
    def read() -> int:
        text = os.environ.get(name, "").strip()
        if not text:
            return default
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} must be a whole number; got {text!r}") from None

    return read


def _float_or_none(name: str) -> Callable[[], float | None]:
    def read() -> float | None:
        text = os.environ.get(name, "").strip()
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} must be a number; got {text!r}") from None

    return read


def _str(name: str, default: str) -> Callable[[], str]:
    return lambda: os.environ.get(name) or default


max_n_sequences = _int("VLLM_MAX_N_SEQUENCES", 16384)
max_logprob_entries = _int("VLLM_MAX_LOGPROB_ENTRIES", 50_000_000)
max_completion_prompts = _int("VLLM_MAX_COMPLETION_PROMPTS", 1024)
max_stop_strings = _int("VLLM_MAX_STOP_STRINGS", 4)
max_num_bad_words = _int("VLLM_MAX_NUM_BAD_WORDS", 128)
enable_v1_multiprocessing = _int("VLLM_ENABLE_V1_MULTIPROCESSING", 0)
engine_ready_timeout_s = _int("VLLM_ENGINE_READY_TIMEOUT_S", 600)
output_proc_chunk_size = _int("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", 128)
batch_invariant = _int("VLLM_BATCH_INVARIANT", 0)
cpu_kvcache_space = _float_or_none("VLLM_CPU_KVCACHE_SPACE")
cpu_omp_threads_bind = _str("VLLM_CPU_OMP_THREADS_BIND", "auto")
logging_level = _str("VLLM_LOGGING_LEVEL", "INFO")
api_key = _str("VLLM_API_KEY", "")
openai_api_key = _str("OPENAI_API_KEY", "")
server_dev_mode = _int("VLLM_SERVER_DEV_MODE", 0)
http_timeout_keep_alive = _int("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5)
keep_alive_on_engine_death = _int("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", 0)
log_stats_interval = _int("VLLM_LOG_STATS_INTERVAL", 10)


def cache_root() -> str:
    return os.environ.get("VLLM_CACHE_ROOT") or os.path.join(os.path.expanduser("~"), ".cache", "vllm")


def plugins() -> set[str] | None:
    text = os.environ.get("VLLM_PLUGINS")
    return None if text is None else {name.strip() for name in text.split(",") if name.strip()}
