"""The ops on CUDA: torch's kernels, and those of the reference that CUDA does in another way."""

import torch

from vllm.ops.torch_reference import TorchReference

# torch before 2.8 rounds such a product to the weights' type.
_HAS_WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()


class CudaOps(TorchReference):
    """What is not here is computed by the reference."""

    def linear_to_float32(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if scale is not None or weight.dtype == torch.float32 or not _HAS_WIDE_RESULTS:
            return super().linear_to_float32(x, weight, scale, out)
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32, out=out)
