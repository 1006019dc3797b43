"""What is asked of every engine, and what it costs at least: the arithmetic behind the shares of a probe."""

import json
import pathlib
import struct
from typing import NamedTuple

_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}


class Workload(NamedTuple):
    """Prompts of random token ids; what is timed, and in which unit it is reported."""

    name: str
    title: str
    unit: str
    num_prompts: int
    input_len: int
    output_len: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kind: str = "output"  # output, decode, prompt, fan_out, memory: see compute_figure
    is_once: bool = False  # a fresh process is measured rather than a second run in one
    is_rate: bool = True  # more is better, and pairs of engines have a ratio

    def make_command(self, seed: int) -> dict[str, object]:
        """Return what an engine process gets."""
        names = ("kind", "num_prompts", "input_len", "output_len", "logprobs", "prompt_logprobs")
        return {"do": "run", "seed": seed, **{name: getattr(self, name) for name in names}}

    def compute_figure(self, answer: dict[str, float]) -> float:
        """Return the figure of one slice from what the engine process measured."""
        if self.kind == "decode":
            return (self.output_len - 1) / answer["seconds"]
        if self.kind == "output":
            return self.num_prompts * self.output_len / answer["seconds"]
        if self.kind == "prompt":
            return self.num_prompts * self.input_len / answer["seconds"]
        return answer["ratio"] if self.kind == "fan_out" else answer["mib"]


WORKLOADS = [
    Workload(
        "memory",
        "extra peak memory of prompt_logprobs=1, 1,900 tokens",
        "MiB",
        *(1, 1900, 1),
        prompt_logprobs=1,
        kind="memory",
        is_once=True,
        is_rate=False,
    ),
    Workload("stream", "one stream, 32 in / 64 out, second to last token", "tok/s", 1, 32, 64, kind="decode"),
    Workload("batch", "32 × (128 in / 64 out)", "output tok/s", 32, 128, 64),
    Workload("batch-logprobs", "32 × (128 in / 64 out), logprobs=5", "output tok/s", 32, 128, 64, logprobs=5),
    Workload("prefill", "8 × 1024 in / 1 out", "prompt tok/s", 8, 1024, 1, kind="prompt"),
    Workload(
        "prefill-logprobs",
        "8 × 1024 in / 1 out, prompt_logprobs=5",
        "prompt tok/s",
        *(8, 1024, 1),
        prompt_logprobs=5,
        kind="prompt",
    ),
    Workload(
        "fan-out",
        "n=16 against n=1, 4 × 120 in / 1 out",
        "time ratio",
        *(4, 120, 1),
        kind="fan_out",
        is_rate=False,
    ),
]


class ModelCosts(NamedTuple):
    """What a model's folder says about the work in a token."""

    num_weights: int  # that a token reads: the head counts, an embedding that is not the head doesn't
    head_weights: int
    num_layers: int
    attention_width: int  # num_heads · head_dim
    gguf_bytes: int

    @classmethod
    def read(cls, folder: pathlib.Path, gguf: pathlib.Path | None) -> "ModelCosts":
        config = json.loads((folder / "config.json").read_text())
        head = config["vocab_size"] * config["hidden_size"]
        total = 0
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__" and "embed_tokens" not in name and "lm_head" not in name:
                    size = 1
                    for dimension in entry["shape"]:
                        size *= dimension
                    total += size
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return cls(
            num_weights=total + head,
            head_weights=head,
            num_layers=config["num_hidden_layers"],
            attention_width=num_heads * head_dim,
            gguf_bytes=gguf.stat().st_size if gguf is not None else 0,
        )

    def compute_share(self, workload: Workload, figure: float, stored_as: str, probe: dict[str, float]) -> float | None:
        """Return which share of the probe's rate a figure means; None where no single limit counts."""
        if workload.kind == "decode":
            num_bytes = self.gguf_bytes if stored_as == "gguf" else self.num_weights * _WEIGHT_BYTES[stored_as]
            return figure * num_bytes / (1e9 * probe["gb_per_s"])
        if workload.kind == "prompt":
            return figure * self._count_flops_a_prompt_token(workload) / (1e9 * probe["gflop_per_s"])
        return None

    def _count_flops_a_prompt_token(self, workload: Workload) -> float:
        """Products with the layers' weights, causal attention (each score and each sum 2 a number), scored rows."""
        layers = 2 * (self.num_weights - self.head_weights)
        attention = 4 * self.num_layers * self.attention_width * (workload.input_len + 1) / 2
        scored_share = 1 if workload.prompt_logprobs is not None else 1 / workload.input_len
        return layers + attention + scored_share * 2 * self.head_weights
