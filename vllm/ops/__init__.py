"""The operations on tensors, by device: callers use `vllm.ops.api`, and nothing else of this package."""
