"""A program in one call gives the bits of its ops one by one, whatever the ops, their sizes and the step's size."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.oracle import REFERENCE
from vllm.ops import api as ops
from vllm.ops.compiled_program import CompiledProgram, can_compile
from vllm.ops.program import CacheShape, OpKind, Program, ProgramStep, RotationTable, run_op_by_op
from vllm.ops.program_layout import BufferPlace, make_layout
from vllm.ops.program_recorder import CannotRecordError, Recorder, record
from vllm.v1.attention import make_attention_metadata

VOCAB_SIZE, NUM_POSITIONS, BLOCK_SIZE = 97, 2100, 16
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu"]
KINDS = ["float32", "bfloat16", "int8", "int8 groups"]


def make(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Weights:
    """Random weights, of the number that was asked for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def row(self, size: int) -> torch.Tensor:
        return make(size, seed=self.rng.getrandbits(30)) * 0.2 + 1

    def matrix(self, num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind = self.rng.choice(KINDS if size % 32 == 0 else KINDS[:3])
        wide = make(num_rows, size, seed=self.rng.getrandbits(30)) / size**0.5
        if kind == "float32":
            return wide, None
        if kind == "bfloat16":
            return wide.bfloat16(), None
        has_groups = kind == "int8 groups"
        shape = ops.get_scale_shape(num_rows, size, has_groups)
        scale = make(*shape, seed=self.rng.getrandbits(30)).abs() / 127 / size**0.5
        return ops.store_int8((wide * size**0.5 * 40).round().clamp(-127, 127)), scale

    def linear(self, x: Any, num_rows: int) -> Any:
        weight, scale = self.matrix(num_rows, x.width)
        bias = self.row(num_rows) - 1 if self.rng.random() < 0.5 else None
        return ops.linear(x, weight, bias, scale)


def make_tables(rng: random.Random, dims: list[int]) -> list[RotationTable]:
    tables = [make(NUM_POSITIONS, 2 * dim, seed=rng.getrandbits(30)) for dim in dims]
    return [RotationTable(lambda _, table=table: table, dim) for table, dim in zip(tables, dims, strict=True)]  # type: ignore[misc]


def attend(r: Recorder, w: Weights, x: Any, layer: int, rotation: tuple[Any, Any]) -> Any:
    """Attention as a model's layer does it."""
    rng, cache = w.rng, r.caches[layer]
    num_kv_heads, head_dim = cache.shape[3:]
    num_heads = num_kv_heads * rng.choice([1, 2, 3])
    qkv = w.linear(x, (num_heads + 2 * num_kv_heads) * head_dim)
    norms = [w.row(head_dim) if rng.random() < 0.5 else None for _ in range(2)]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    query = ops.rotate_and_write_kv(heads, *rotation, cache, r.step.slot_mapping, *norms, 1e-6)
    step, window = r.step, rng.choice([None, 1, 7, 40])
    tables = (step.block_tables, step.query_starts, step.seq_lens)
    return ops.paged_attention(query, cache, *tables, head_dim**-0.5, window).flatten(1)


def describe(seed: int, num_ops: int = 14) -> tuple[Callable[[Recorder], Any], list[CacheShape]]:
    """Return a random program as what it does with a recorder, and its layers' caches."""
    rng = random.Random(seed)
    hidden = rng.choice([1, 16, 31, 32, 64, 96])
    shapes = [CacheShape(rng.choice([1, 2, 3]), rng.choice([2, 6, 16, 20])) for _ in range(3)]
    tables = make_tables(rng, [rng.choice([2, shapes[n].head_dim // 2 // 2 * 2 or 2]) for n in range(3)])

    def run(r: Recorder) -> Any:
        w = Weights(random.Random(seed))
        rotations = [r.get_rotation(r.step.positions, table) for table in tables]
        pool = [ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, hidden), torch.float32)]
        layers = iter(range(len(shapes)))
        for _ in range(num_ops):
            x, y = rng.choice(pool[-5:]), rng.choice(pool)
            kind = rng.choice(
                ["norm", "residual", "mlp", "plain mlp", "shared", "wide", "add", "scale", "attend", "attend"]
            )
            if kind == "residual" and x is not y:
                pool.append(ops.rms_norm(x, w.row(hidden), 1e-5, y))
            elif kind == "mlp":
                size = rng.choice([1, 17, 48, 200])
                normed = ops.rms_norm(x, w.row(hidden), 1e-5, y if x is not y else None)
                gated = ops.gate_and_multiply(w.linear(normed, 2 * size), rng.choice(ACTIVATIONS))
                pool.append(w.linear(gated, hidden))
            elif kind == "shared":  # what lies between products is read twice
                product = w.linear(x, 2 * hidden)
                pool += [ops.gate_and_multiply(product, rng.choice(ACTIVATIONS)), w.linear(product, hidden)]
            elif kind == "wide":
                pool.append(w.linear(w.linear(x, hidden + 33), hidden))
            elif kind == "plain mlp":
                inner = ops.activate(
                    w.linear(ops.rms_norm(x, w.row(hidden), 1e-5), 3 * hidden), rng.choice(ACTIVATIONS)
                )
                pool.append(w.linear(inner, hidden))
            elif kind == "add":
                pool.append(x + y)
            elif kind == "scale":
                pool.append(x * rng.choice([0.5, 0.0441]))
            elif kind == "attend" and (layer := next(layers, None)) is not None:
                fitting = [rotations[n] for n in range(3) if tables[n].dim <= shapes[layer].head_dim]
                normed = ops.rms_norm(x, w.row(hidden), 1e-5)
                pool.append(w.linear(attend(r, w, normed, layer, rng.choice(fitting)), hidden))
            else:
                pool.append(ops.rms_norm(x, w.row(hidden), 1e-5))
        return rng.choice(pool[-3:])

    return run, shapes


def make_program(seed: int, num_ops: int = 14) -> Program:
    run, shapes = describe(seed, num_ops)
    return record(run, shapes, lambda _: True)


def make_step(num_tokens: int, seed: int = 0) -> ProgramStep:
    """Return a step of a long request and some short ones, each with more tokens in the cache."""
    rng = np.random.default_rng(seed)
    lens = [1] * min(num_tokens - 1, 3) + [max(1, num_tokens - 3)]
    query_lens = np.array(lens[: num_tokens or 1])
    seq_lens = query_lens + rng.integers(0, 40, len(query_lens))
    num_blocks = -(-int(seq_lens.max()) // BLOCK_SIZE)
    tables = rng.permutation(len(query_lens) * num_blocks).astype(np.int32).reshape(len(query_lens), num_blocks)
    attn = make_attention_metadata(query_lens, seq_lens, tables, BLOCK_SIZE, "cpu")
    return ProgramStep(
        torch.from_numpy(rng.integers(0, VOCAB_SIZE, num_tokens)),
        torch.from_numpy(attn.host.positions),
        attn.slot_mapping,
        attn.block_tables,
        attn.query_starts,
        attn.seq_lens,
    )


def make_caches(program: Program, step: ProgramStep, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    num_blocks = step.block_tables.numel()
    return [make(2, num_blocks, BLOCK_SIZE, *shape, seed=n).to(dtype) for n, shape in enumerate(program.caches)]


def run_compiled(program: Program, step: ProgramStep, caches: list[torch.Tensor]) -> torch.Tensor:
    compiled = CompiledProgram(program)
    num_bytes = compiled.count_scratch_bytes(len(step.token_ids))
    compiled._scratch = torch.full((num_bytes // 4,), torch.nan)
    return compiled.run(step, NUM_POSITIONS, caches)


def is_same(program: Program, step: ProgramStep, dtype: torch.dtype = torch.float32) -> bool:
    caches, others = make_caches(program, step, dtype), make_caches(program, step, dtype)
    found, wanted = run_compiled(program, step, caches), run_op_by_op(program, ops, step, others)
    assert wanted.isfinite().all()
    return torch.equal(found, wanted) and all(map(torch.equal, caches, others))


@pytest.mark.parametrize("seed", range(40))
def test_one_call_gives_the_bits_of_op_by_op(seed: int) -> None:
    program = make_program(seed)
    for num_tokens in (1, 2, 5, 33, 200):
        assert is_same(program, make_step(num_tokens, seed))


@pytest.mark.parametrize("seed", range(100, 106))
def test_more_rows_than_a_group_takes_at_a_time(seed: int) -> None:
    assert is_same(make_program(seed), make_step(2050, seed))


@pytest.mark.parametrize("seed", range(200, 204))
def test_one_call_over_bfloat16_caches(seed: int) -> None:
    assert is_same(make_program(seed), make_step(37, seed), torch.bfloat16)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_do_not_depend_on_threads(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert is_same(make_program(300, 30), make_step(40))
    finally:
        torch.set_num_threads(before)


def test_the_reference_agrees() -> None:
    """Of a program as a model's: random ones multiply rounding errors."""
    rng = random.Random(7)
    table = make_tables(rng, [8])[0]

    def run(r: Recorder) -> Any:
        w = Weights(random.Random(7))
        residual = ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, 64), torch.float32)
        added = attend(r, w, ops.rms_norm(residual, w.row(64), 1e-5), 0, r.get_rotation(r.step.positions, table))
        normed = ops.rms_norm(w.linear(added, 64), w.row(64), 1e-5, residual)
        added = w.linear(ops.gate_and_multiply(w.linear(normed, 2 * 96), "silu"), 64)
        return ops.rms_norm(added, w.row(64), 1e-5, residual)

    program, step = record(run, [CacheShape(2, 16)], lambda _: True), make_step(50)
    found = run_compiled(program, step, make_caches(program, step))
    wanted = run_op_by_op(program, REFERENCE, step, make_caches(program, step))
    assert torch.allclose(found, wanted, atol=2e-5, rtol=1e-4)


def test_a_feed_forward_part_is_one_group_whose_inside_takes_no_room_for_all_rows() -> None:
    def run(r: Recorder) -> Any:
        w = Weights(random.Random(0))
        residual = ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, 32), torch.float32)
        normed = ops.rms_norm(residual, w.row(32), 1e-5)
        added = w.linear(ops.gate_and_multiply(w.linear(normed, 400), "silu"), 32)
        return ops.rms_norm(added, w.row(32), 1e-5, residual)

    program = record(run, [], lambda _: True)
    layout = make_layout(program)
    assert [op.kind for op in layout.ops] == [
        OpKind.EMBED,
        OpKind.RMS_NORM,
        OpKind.GATED_LINEAR,
        OpKind.LINEAR,
        OpKind.RMS_NORM,
    ]
    assert layout.group_sizes == [1, 3, 1, 1, 1]
    assert layout.place_widths == [32 + 32, 32 + 208, 400]
    assert layout.buffers[program.output].place == BufferPlace.OUTPUT


def test_what_a_group_still_reads_is_not_overwritten_by_its_first_rows() -> None:
    """The group's output is wider than its input: the first part's rows would lie in the second part's input."""

    def run(r: Recorder) -> Any:
        w = Weights(random.Random(0))
        x = ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, 32), torch.float32)
        normed = ops.rms_norm(x, w.row(32), 1e-5)
        return w.linear(w.linear(w.linear(normed, 100), 64), 32)

    assert is_same(record(run, [], lambda _: True), make_step(1500))


def test_a_product_that_is_the_result_is_written_though_a_gate_reads_it() -> None:
    def run(r: Recorder) -> Any:
        w = Weights(random.Random(0))
        product = w.linear(ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, 32), torch.float32), 64)
        ops.gate_and_multiply(product, "silu")
        return product

    for num_tokens in (3, 300):
        assert is_same(record(run, [], lambda _: True), make_step(num_tokens))


def test_a_feed_forward_part_without_gates_is_a_group_too() -> None:
    def run(r: Recorder) -> Any:
        w = Weights(random.Random(0))
        x = ops.embed(r.step.token_ids, *w.matrix(VOCAB_SIZE, 32), torch.float32)
        return w.linear(ops.activate(w.linear(ops.rms_norm(x, w.row(32), 1e-5), 128), "gelu"), 32)

    program = record(run, [], lambda _: True)
    assert make_layout(program).group_sizes == [1, 4, 1, 1, 1]
    assert is_same(program, make_step(1500))


@pytest.mark.parametrize("what", ["token", "negative token", "position", "slot", "block"])
def test_what_lies_outside_its_table_is_refused(what: str) -> None:
    program, step = next(
        (program, make_step(9))
        for program in map(make_program, range(99))
        if OpKind.ATTEND in {op.kind for op in program.ops}
    )
    caches = make_caches(program, step)
    name, value = {
        "token": ("token_ids", VOCAB_SIZE),
        "negative token": ("token_ids", -1),
        "position": ("positions", NUM_POSITIONS),
        "slot": ("slot_mapping", BLOCK_SIZE * step.block_tables.numel()),
        "block": ("block_tables", -1),
    }[what]
    broken = getattr(step, name).clone()
    broken.view(-1)[slice(None) if what == "block" else -1] = value
    with pytest.raises(IndexError):
        run_compiled(program, step._replace(**{name: broken}), caches)


def test_a_cache_of_another_shape_is_refused() -> None:
    program, step = make_program(1), make_step(3)
    with pytest.raises(AssertionError, match="cache"):
        run_compiled(program, step, [cache[..., :1].contiguous() for cache in make_caches(program, step)])


def test_weights_that_the_library_cannot_read_are_not_compiled() -> None:
    def run(r: Recorder) -> Any:
        return ops.embed(r.step.token_ids, torch.zeros(8, 4, dtype=torch.float16), None, torch.float32)

    assert not can_compile(record(run, [], lambda _: True))


REFUSED: dict[str, Callable[[Recorder, Any], Any]] = {
    "torch": lambda r, x: torch.relu(x),
    "a part of the rows": lambda r, x: x[:3],
    "in place": lambda r, x: x.__iadd__(x),
    "as many as a number": lambda r, x: x if x.shape[0] == 1 else x * 2.0,
    "a value": lambda r, x: x * 2.0 if x else x,
    "a weight that is computed": lambda r, x: ops.rms_norm(x, torch.ones(16), 1e-5),
    "another product": lambda r, x: ops.linear(x, torch.zeros(4, 17)),
    "another's buffer": lambda r, x: x + Recorder([]).append(OpKind.SCALE, 16, input=None),
    "other positions": lambda r, x: r.get_rotation(r.step.token_ids, RotationTable(lambda n: torch.empty(0), 2)),
    "no buffer": lambda r, x: 3,
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_no_op_stands_for_is_not_recorded(what: str) -> None:
    known = torch.zeros(VOCAB_SIZE, 16)

    def run(r: Recorder) -> Any:
        return REFUSED[what](r, ops.embed(r.step.token_ids, known, None, torch.float32))

    with pytest.raises((CannotRecordError, TypeError, AttributeError)):
        record(run, [], lambda tensor: tensor is known)
