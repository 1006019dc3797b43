"""Uses an installed wheel as a stranger would; the argument is the folder it must have come from."""

import importlib.metadata
import pathlib
import subprocess
import sys

import torch

import vllm
from vllm import _custom_ops

site = pathlib.Path(sys.argv[1])
package = pathlib.Path(vllm.__file__).parent
assert package == site / "vllm", f"{package} was imported instead of the wheel's"
assert vllm.__version__ == importlib.metadata.version("vllm")
assert (package / "py.typed").exists(), "py.typed was not shipped"
assert _custom_ops.is_compiled(), "the wheel holds no compiled kernels"
logits = torch.tensor([[0.0, 2.0, 1.0]])
scored = _custom_ops.score_rows(logits, torch.tensor([2]), torch.tensor([2]), 2, as_logits=False)
assert scored.token_ids.tolist() == [[2, 1, -1]] and scored.ranks.tolist() == [[2, 1, 0]], scored
command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"]
said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
assert vllm.__version__ in said, said
print(f"vllm {vllm.__version__}: the wheel works ({_custom_ops.get_simd_variant()} kernels)")
