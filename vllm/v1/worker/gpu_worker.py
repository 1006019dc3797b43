"""The worker: start-up, memory, sleep. It owns the device and its model runner."""

import gc

import torch

from vllm import host_memory, platforms
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.model_loader import resolve_dtype
from vllm.plugins import load_general_plugins
from vllm.v1.messages import EngineCoreReady, ModelRunnerOutput, SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.memory import Memory, choose_kv_bytes, get_usable_blocks, run_largest_step, size_kv_cache

logger = init_logger(__name__)

WAKE_TAGS = ("weights", "kv_cache")


class Worker:
    """Runs the model on one device; also on a CPU."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.device = torch.device(platforms.resolve_device(vllm_config.device))
        model_config = vllm_config.model_config
        self.dtype = resolve_dtype(model_config.dtype, model_config.transformer.dtype, self.device.type)
        self.num_threads = platforms.choose_num_threads()
        self.model_runner = GPUModelRunner(vllm_config, self.device, self.dtype)
        self.num_blocks = 0
        self._asleep: set[str] = set()  # tags whose memory is given back
        self._sleep_level = 0

    # ------------------------------------------------------------ start-up

    def start(self) -> EngineCoreReady:
        """Load the model, settle what fits, and take the memory for it.

        Raises:
            VLLMValidationError: the device is not there, or memory does not suffice.
        """
        self._init_device()
        runner = self.model_runner
        runner.load_model()
        runner.allocate_workspace()
        memory = self._measure_memory()
        bytes_per_block = runner.kv_cache.count_block_bytes(runner.model.get_cache_specs())
        kv_bytes = choose_kv_bytes(
            self.vllm_config.cache_config,
            memory,
            is_cpu=self.device.type == "cpu",
            usable_bytes=get_usable_blocks(self.vllm_config) * bytes_per_block,
        )
        size = size_kv_cache(self.vllm_config, kv_bytes, bytes_per_block)
        self.num_blocks = size.num_blocks
        if size.max_model_len < self.vllm_config.model_config.max_model_len:
            logger.warning(
                "max_model_len is lowered from %d to %d, the tokens that the KV cache holds",
                self.vllm_config.model_config.max_model_len,
                size.max_model_len,
            )
        self._allocate_kv_cache()
        runner.allocate_batch(size.max_model_len)
        if self.device.type == "cpu":
            host_memory.keep_freed_memory()
        return EngineCoreReady(
            num_gpu_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            num_threads=self.num_threads,
            weights_bytes=runner.model.weights_bytes(),
        )

    def _init_device(self) -> None:
        torch.set_num_threads(self.num_threads)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise VLLMValidationError(
                    "device must be one that is here; torch finds no CUDA GPU (device='cpu' runs on the CPU)",
                    parameter="device",
                    value=self.vllm_config.device,
                )
            torch.cuda.set_device(self.device)

    def _measure_memory(self) -> Memory:
        """Read what is left beside the weights, the workspace and, on a GPU, what the largest step takes."""
        # Rows whose raw logits are set aside during sampling, and the scorer's own, fit in a second workspace.
        spare = self.model_runner.workspace.nbytes
        if self.device.type == "cpu":
            # The workspace is not touched yet, and neither is what steps work in.
            spare += spare + self.model_runner.model.count_step_bytes(
                self.vllm_config.scheduler_config.max_num_batched_tokens
            )
            available = max(0, platforms.get_available_memory() - spare)
            return Memory(platforms.get_total_memory(), available, platforms.get_resident_memory() + spare)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kv_bytes = run_largest_step(self.model_runner)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before - kv_bytes
        self._return_device_memory()
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(total, max(0, free - peak - spare), total - free + peak + spare)

    def _allocate_kv_cache(self) -> None:
        runner = self.model_runner
        try:
            runner.allocate_kv_cache(self.num_blocks)
        except (RuntimeError, MemoryError) as error:  # torch has no narrower type for a CPU allocation that fails
            num_bytes = self.num_blocks * runner.kv_cache.count_block_bytes(runner.model.get_cache_specs())
            raise VLLMValidationError(
                f"the KV cache of {num_bytes} bytes can't be allocated on {self.device}; give it less "
                "(kv_cache_memory_bytes, VLLM_CPU_KVCACHE_SPACE or gpu_memory_utilization)",
                parameter="kv_cache_memory_bytes",
                value=num_bytes,
            ) from error

    # ------------------------------------------------------------ steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}); call wake_up first")
        return self.model_runner.execute_model(scheduler_output)

    def invalidate_model(self) -> None:
        """Take note that a caller's own code has run here, which may have changed the model."""
        self.model_runner.invalidate_model()

    # ------------------------------------------------------------ sleep

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def sleep(self, level: int = 1) -> None:
        """Give memory back: the KV cache, and the weights.

        Level 1 keeps the weights in the CPU's memory. Level 2 drops them; `wake_up` reads the checkpoint again, so
        that weights which nobody hands over afterwards are whole. No request may be running.
        """
        if level not in (1, 2):
            raise VLLMValidationError("level must be 1 or 2", parameter="level", value=level)
        runner = self.model_runner
        runner.kv_cache.drop()
        if "weights" not in self._asleep:
            self._sleep_level = level
            if level == 2:
                runner.drop_model()
            elif self.device.type != "cpu":
                runner.model.to("cpu")
        self._asleep = set(WAKE_TAGS)
        self._return_device_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back that `tags` name ("weights", "kv_cache"; None: both)."""
        wanted = set(WAKE_TAGS if tags is None else tags)
        if unknown := wanted - set(WAKE_TAGS):
            raise VLLMValidationError(
                f"tags must be among {', '.join(WAKE_TAGS)}", parameter="tags", value=sorted(unknown)
            )
        if "weights" in wanted & self._asleep:
            if self._sleep_level == 2:
                self.model_runner.load_model()
            elif self.device.type != "cpu":
                self.model_runner.model.to(self.device)
            self._asleep.discard("weights")
        if "kv_cache" in wanted & self._asleep:
            self._allocate_kv_cache()
            self._asleep.discard("kv_cache")

    def shutdown(self) -> None:
        """Give everything back; a second call does nothing."""
        self._asleep = set(WAKE_TAGS)
        self._sleep_level = 2
        self.model_runner.release()
        self._return_device_memory()

    def _return_device_memory(self) -> None:
        """Let the allocator hand back what is free."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            host_memory.return_free_memory()
