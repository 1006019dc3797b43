"""An engine's process as the driver sees it: started, asked, and stopped in its tracks while others are measured."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

WORKER = pathlib.Path(__file__).with_name("worker.py")
# What the peers want on a CPU; the user's own environment wins.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class EngineFailed(Exception):
    """The process ended; the message holds the end of what it wrote."""


class EngineSpec(NamedTuple):
    """How to start an engine."""

    name: str
    python: str
    engine: str  # a key of worker.ENGINES
    model: str
    stored_as: str  # float32, bfloat16, int8 or gguf: what a token's weights weigh
    options: Mapping[str, Any] = {}
    is_ours: bool = False


def make_environment(*, is_original_vllm: bool) -> dict[str, str]:
    """Return the environment of a process to measure."""
    environment = _ENVIRONMENT | dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if is_original_vllm:  # left alone it keeps a core for something else
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    return environment


class EngineProcess:
    """A running engine; asleep (SIGSTOP, with all that it started) except while it is asked."""

    def __init__(self, spec: EngineSpec, log_folder: pathlib.Path) -> None:
        self.spec = spec
        self._log_path = log_folder / f"{spec.name.replace(' ', '-')}.log"
        start = time.perf_counter()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [spec.python, str(WORKER), spec.engine, spec.model, json.dumps(dict(spec.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=make_environment(is_original_vllm=spec.engine == "vllm" and not spec.is_ours),
                cwd=tempfile.gettempdir(),  # not this project: its `vllm` would be found before the peer's
                start_new_session=True,
            )
        try:
            self._read()
            self.ready_seconds = time.perf_counter() - start
            one_token = {"num_prompts": 1, "input_len": 32, "output_len": 1, "logprobs": None, "prompt_logprobs": None}
            self._write({"do": "run", "seed": -1, "kind": "prompt", **one_token})
            self._read()
            self.first_token_seconds = time.perf_counter() - start
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, command: Mapping[str, object]) -> dict[str, float] | None:
        """Wake the engine, let it do `command`, and put it to sleep; None: not what this engine does."""
        self._signal(signal.SIGCONT)
        try:
            self._write(command)
            answer: dict[str, float] | None = self._read()
        finally:
            self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process and all that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both are pipes"
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _write(self, message: Mapping[str, object]) -> None:
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None, "stdin is a pipe"
        try:
            pipe.write(json.dumps(dict(message)) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise EngineFailed(self._tell_end()) from None

    def _read(self) -> Any:
        pipe: IO[str] | None = self._process.stdout
        assert pipe is not None, "stdout is a pipe"
        line = pipe.readline()
        if not line:
            raise EngineFailed(self._tell_end())
        return json.loads(line)

    def _tell_end(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"{self.spec.name} ended: " + " | ".join(lines[-3:])
