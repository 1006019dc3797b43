"""Times each kernel against its torch oracle and against what the machine gives at that moment.

Calls of all rivals and of two probes (reading memory, a product that stays in the cache) alternate, so that a machine
that wanders slows all of them alike; figures are medians and their shares of the probes' medians. Weights go round in
a pool that does not fit the cache.

    python -m benchmarks.bench_kernels --seconds 40 --json kernels.json
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import report
from vllm import platforms
from vllm.ops import api as ops
from vllm.ops.torch_reference import TorchReference
from vllm.v1.attention import AttentionBackend, AttentionShape, get_attention_backend
from vllm.v1.attention.backend import TorchReferenceBackend

_POOL_BYTES = 192 << 20
_PROBE_SIZE = 640  # three matrices of 1.6 MB
_KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_INT8_GROUPS = "int8, scales of 32"
# (elements in, elements out): the matrices of SmolLM2-135M, its head cut to a sixth.
_SHAPES = [(576, 960), (576, 3072), (1536, 576), (576, 8192)]
_ROWS = [1, 8, 32, 128]


class Case(NamedTuple):
    """One op on one size: rivals by name, what one call costs."""

    name: str
    rivals: dict[str, Callable[[int], object]]  # each takes the number of the round
    num_bytes: dict[str, int]  # read or written, by rival
    num_flops: int
    repeats: int = 1  # calls timed as one: a single short one mostly finds its own code out of the cache


class Probe:
    """What the machine gives at the moment: memory read in GB/s, products in GFLOP/s."""

    def __init__(self) -> None:
        self.memory = torch.ones(_POOL_BYTES // 4).split(1 << 20)
        self.left, self.right = torch.randn(2, _PROBE_SIZE, _PROBE_SIZE)

    def read(self, turn: int) -> None:
        self.memory[turn % len(self.memory)].sum()

    def multiply(self, _: int) -> None:
        torch.mm(self.left, self.right)


def measure(case: Case, probe: Probe, seconds: float) -> list[list[object]]:
    """Return a row of the table for each rival."""
    calls = {**case.rivals, "memory probe": probe.read, "product probe": probe.multiply}
    repeats = dict.fromkeys(calls, 1) | dict.fromkeys(case.rivals, case.repeats)
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for number, (name, call) in enumerate(calls.items()):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call(turn * 7 + number * 5)  # no rival finds in the cache what another has just read
            times[name].append((time.perf_counter() - start) / repeats[name])
        if time.perf_counter() > end and turn >= 4:
            break
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    memory_rate = probe.memory[0].nbytes / medians["memory probe"] / 1e9
    product_rate = 2 * _PROBE_SIZE**3 / medians["product probe"] / 1e9
    rows: list[list[object]] = []
    for name in case.rivals:
        seconds_a_call = medians[name]
        rate, flops = case.num_bytes[name] / seconds_a_call / 1e9, case.num_flops / seconds_a_call / 1e9
        shares = (rate, rate / memory_rate, flops, flops / product_rate)
        rows.append([case.name, name, seconds_a_call * 1e6, *shares, len(times[name])])
    return rows


def make_linear_case(size: int, num_columns: int, num_rows: int) -> Case:
    """Our products for each stored type, against torch's with plain and with packed weights."""
    count = max(2, _POOL_BYTES // (4 * size * num_columns))
    wide = [torch.randn(num_columns, size) for _ in range(count)]
    scales = {"int8": torch.ones(num_columns), _INT8_GROUPS: torch.ones(size // ops.GROUP_SIZE, num_columns)}
    x, out = torch.randn(num_rows, size), torch.empty(num_rows, num_columns)
    rivals: dict[str, Callable[[int], object]] = {}
    num_bytes: dict[str, int] = {}
    for name, kind in (_KINDS | {_INT8_GROUPS: torch.int8}).items():
        pool = [ops.store_int8(weight) if kind == torch.int8 else weight.to(kind) for weight in wide]
        scale = scales.get(name)

        def multiply(turn: int, pool: list[torch.Tensor] = pool, scale: torch.Tensor | None = scale) -> None:
            ops.linear(x, pool[turn % count], None, scale, out)

        rivals[name] = multiply
        num_bytes[name] = pool[0].nbytes + (0 if scale is None else scale.nbytes)
    rivals["torch"] = lambda turn: F.linear(x, wide[turn % count])
    num_bytes["torch"] = wide[0].nbytes
    if torch.backends.mkldnn.is_available():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for weight in wide]
        rivals["torch, packed"] = lambda turn: torch.ops.mkldnn._linear_pointwise(
            x, packed[turn % count], None, "none", [], ""
        )
        num_bytes["torch, packed"] = wide[0].nbytes
    return Case(f"linear {size}→{num_columns}, {num_rows} rows", rivals, num_bytes, 2 * num_rows * size * num_columns)


def make_row_cases(num_rows: int) -> list[Case]:
    """The small operations between products, and scoring: each reads its rows once."""
    x, residual, weight = torch.randn(num_rows, 576), torch.randn(num_rows, 576), torch.ones(576)
    gate_up, logits = torch.randn(num_rows, 3072), torch.randn(num_rows, 49152)
    chosen, num_top = torch.zeros(num_rows, dtype=torch.int64), torch.full((num_rows,), 5, dtype=torch.int32)
    draws = torch.arange(num_rows, dtype=torch.int32), torch.arange(num_rows), torch.full((num_rows,), 100)
    rows, wide = torch.arange(num_rows), torch.empty_like(logits)
    qkv, cache = torch.randn(num_rows, 15, 64), torch.zeros(2, 8, 16, 3, 64)
    cos, sin = torch.randn(2, num_rows, 64)
    embedding = ops.store_int8(torch.ones(49152, 576))

    def filter_copy(table: Any, top_k: int, top_p: float) -> None:  # what is filtered is not again
        wide.copy_(logits)
        settings = (torch.ones(num_rows), torch.full((num_rows,), top_k), torch.full((num_rows,), top_p))
        table.filter_rows(wide, rows, *settings, torch.zeros(num_rows))

    # Name → the call, by a table of ops, and the bytes that it moves.
    calls: dict[str, tuple[Callable[[Any], object], int]] = {
        "embed": (lambda t: t.embed(rows, embedding, torch.ones(49152), torch.float32), 5 * x.numel()),
        "rms_norm": (lambda t: t.rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes),
        "activate, gelu": (lambda t: t.activate(gate_up, "gelu"), 2 * gate_up.nbytes),
        "gate_and_multiply": (lambda t: t.gate_and_multiply(gate_up, "silu"), 3 * gate_up.nbytes // 2),
        "rotate": (lambda t: t.rotate(qkv, cos, sin), 2 * qkv.nbytes),
        "write_kv": (lambda t: t.write_kv(qkv[:, 9:12], qkv[:, 12:], cache, rows), 4 * qkv.nbytes // 5),
        "rotate_and_write_kv": (lambda t: t.rotate_and_write_kv(qkv, cos, sin, cache, rows), 2 * qkv.nbytes),
        "score_rows, 5 of 49,152": (lambda t: t.score_rows(logits, chosen, num_top, 5, False), logits.nbytes),
        "score_rows, 20 of 49,152": (lambda t: t.score_rows(logits, chosen, num_top * 4, 20, False), logits.nbytes),
        "score_given_ids, 5 of 49,152": (
            lambda t: t.score_given_ids(logits, chosen, torch.arange(5).repeat(num_rows, 1), False),
            logits.nbytes,
        ),
        "score_full_rows of 49,152": (lambda t: t.score_full_rows(logits, False), 3 * logits.nbytes),
        "filter_rows, top-p 0.9 of 49,152": (lambda t: filter_copy(t, 49152, 0.9), 2 * logits.nbytes),
        "filter_rows, top-k 50 of 49,152": (lambda t: filter_copy(t, 50, 1.0), 2 * logits.nbytes),
        "philox_bits of 49,152": (lambda t: t.philox_bits(*draws[1:], 49152), 2 * logits.nbytes),
        "draw_rows of 49,152": (lambda t: t.draw_rows(logits, *draws), logits.nbytes),
        "argmax_rows of 49,152": (lambda t: t.argmax_rows(logits), logits.nbytes),
    }
    cases = []
    for name, (call, num_bytes) in calls.items():
        rivals: dict[str, Callable[[int], object]] = {
            "ours": lambda _, call=call: call(ops),
            "torch oracle": lambda _, call=call: call(TorchReference()),
        }
        cases.append(Case(f"{name}, {num_rows} rows", rivals, dict.fromkeys(rivals, num_bytes), 0, repeats=16))
    return cases


def make_attention_case(name: str, query_lens: list[int], seq_lens: list[int]) -> Case:
    """Our attention over a cache of each type, against the torch backend: SmolLM2's heads, caches in turn as layers."""
    num_heads, num_kv_heads, head_dim, block_size = 9, 3, 64, 16
    num_blocks = [-(-n // block_size) for n in seq_lens]
    tables = np.zeros((len(seq_lens), max(num_blocks)), np.int32)
    free = iter(np.random.default_rng(0).permutation(sum(num_blocks)))
    for row, blocks in enumerate(num_blocks):
        tables[row, :blocks] = [next(free) for _ in range(blocks)]
    kernels = get_attention_backend("cpu")
    attn = kernels.make_metadata(np.array(query_lens), np.array(seq_lens), tables, block_size, "cpu")
    shape = (2, sum(num_blocks), block_size, num_kv_heads, head_dim)
    query = torch.randn(sum(query_lens), num_heads, head_dim)
    elements = 2 * sum(seq_lens) * num_kv_heads * head_dim
    count = max(2, _POOL_BYTES // (4 * elements))
    rivals: dict[str, Callable[[int], object]] = {}
    num_bytes: dict[str, int] = {}
    backends: dict[str, AttentionBackend] = {
        "float32": kernels,
        "bfloat16": kernels,
        "torch backend": TorchReferenceBackend(),
    }
    how = AttentionShape(scale=0.125)
    for rival, backend in backends.items():
        dtype = _KINDS.get(rival, torch.float32)
        pool = [torch.randn(shape).to(dtype) for _ in range(count)]
        rivals[rival] = lambda turn, backend=backend, pool=pool: backend.attend(query, pool[turn % count], attn, how)
        num_bytes[rival] = elements * dtype.itemsize
    pairs = sum(sum(range(n - q + 1, n + 1)) for q, n in zip(query_lens, seq_lens, strict=True))
    return Case(f"attention, {name}", rivals, num_bytes, 4 * num_heads * head_dim * pairs)


_ATTENTION: dict[str, tuple[list[int], list[int]]] = {
    "32 decodes at 160 to 191": ([1] * 32, [160 + i for i in range(32)]),
    "1 decode at 2,048": ([1], [2048]),
    "prefill 8 × 128": ([128] * 8, [128] * 8),
    "prefill 1 × 1,024": ([1024], [1024]),
    "256 after 1,792": ([256], [2048]),
    "16 decodes beside a prefill of 512": ([1] * 16 + [512], [180] * 16 + [512]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring, all cases together")
    parser.add_argument("--threads", type=int, default=platforms.choose_num_threads())
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    report.add_output_argument(parser)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    makers: list[tuple[str, Callable[[], Case]]] = [
        (f"linear {size}→{columns}, {rows} rows", lambda s=size, c=columns, r=rows: make_linear_case(s, c, r))
        for (size, columns), rows in itertools.product(_SHAPES, _ROWS)
    ]
    makers += [(case.name, lambda case=case: case) for rows in (1, 32) for case in make_row_cases(rows)]
    makers += [
        (f"attention, {name}", lambda n=name, lens=lens: make_attention_case(n, *lens))
        for name, lens in _ATTENTION.items()
    ]
    makers = [(name, make) for name, make in makers if given.only in name]
    probe, table = Probe(), []
    for _, make in makers:
        table += measure(make(), probe, given.seconds / len(makers))
    columns = ["kernel", "by", "median µs", "GB/s", "of the memory probe", "GFLOP/s", "of the product probe", "calls"]
    report.show(f"Kernels, {given.threads} threads, {ops.get_simd_variant()}", columns, table, given.json)


if __name__ == "__main__":
    main()
