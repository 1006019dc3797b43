"""Where a program's buffers lie: what is alive at once lies apart, everything else shares memory.

Ops that widen rows and narrow them again (a feed-forward part) are grouped: they take some of a step's rows at a time,
so that what lies between them is small whatever the step's size.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm.ops.program import Op, OpKind, Program

_LINE_FLOATS = 16
_PRODUCTS = (OpKind.LINEAR, OpKind.GATED_LINEAR)


class BufferPlace(enum.IntEnum):
    """As in csrc/cpu/api.h: how many rows a buffer has room for."""

    ALL_ROWS = 0
    PART_ROWS = 1
    FEWER_ROWS = 2
    OUTPUT = 3


class PlacedBuffer(NamedTuple):
    """`offset`: floats a row that lie before it in its place."""

    place: BufferPlace
    offset: int
    width: int


@dataclass(frozen=True)
class Layout:
    """A program's ops as they run, and where its buffers lie."""

    ops: list[Op]
    group_sizes: list[int]  # of the group that an op is the first of; 1: it takes all rows
    buffers: list[PlacedBuffer]
    place_widths: list[int]  # floats a row of each place in the scratch


def make_layout(program: Program) -> Layout:
    """Fuse gates into products, group ops, and lay out the buffers."""
    reads = Counter(number for op in program.ops for number in op.reads)
    reads[program.output] += 1
    ops = _fuse_gates(program.ops, reads)
    groups = _find_groups(ops, reads, program.widths)
    group_of = {index: group for group in groups for index in group}
    places = _choose_places(ops, groups, program.output)
    lives = _find_lives(ops, group_of, places)
    offsets: dict[int, int] = {}
    place_widths = [0] * BufferPlace.OUTPUT
    for place in (BufferPlace.ALL_ROWS, BufferPlace.PART_ROWS, BufferPlace.FEWER_ROWS):
        found = _place_first_fit({n: lives[n] for n in lives if places[n] == place}, program.widths)
        offsets |= found
        place_widths[place] = max((offset + _round_up(program.widths[n]) for n, offset in found.items()), default=0)
    buffers = [
        PlacedBuffer(places.get(number, BufferPlace.ALL_ROWS), offsets.get(number, 0), width)
        for number, width in enumerate(program.widths)
    ]
    sizes = [len(group) if (group := group_of.get(i)) is not None and group[0] == i else 1 for i in range(len(ops))]
    return Layout(ops, sizes, buffers, place_widths)


def _fuse_gates(ops: Sequence[Op], reads: Counter[int]) -> list[Op]:
    """Make one op of a product and the gate that alone reads it."""
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        is_gate = op.kind == OpKind.GATE_AND_MULTIPLY
        if is_gate and last is not None and last.kind == OpKind.LINEAR and _feeds(last, op, reads):
            product = last.output
            fused[-1] = replace(
                last, kind=OpKind.GATED_LINEAR, second=product, output=op.output, activation=op.activation
            )
        else:
            fused.append(op)
    return fused


def _feeds(first: Op, then: Op, reads: Counter[int]) -> bool:
    """Say whether `then` alone reads what `first` makes, as its input."""
    return then.input == first.output != then.second and reads[first.output] == 1


def _find_groups(ops: Sequence[Op], reads: Counter[int], widths: Sequence[int]) -> list[range]:
    """Return the ops from a widening product to the product after it, with the norm before and activations between."""
    groups: list[range] = []
    for index, op in enumerate(ops):
        if not (op.kind == OpKind.GATED_LINEAR or (op.kind == OpKind.LINEAR and widths[op.output] > widths[op.input])):
            continue
        first, last = index, index + 1
        while last < len(ops) and ops[last].kind == OpKind.ACTIVATE and _feeds(ops[last - 1], ops[last], reads):
            last += 1
        if last == len(ops) or ops[last].kind not in _PRODUCTS or not _feeds(ops[last - 1], ops[last], reads):
            continue
        if first > 0 and ops[first - 1].kind == OpKind.RMS_NORM and _feeds(ops[first - 1], op, reads):
            first -= 1
        if not groups or groups[-1].stop <= first:
            groups.append(range(first, last + 1))
    return groups


def _find_lives(ops: Sequence[Op], group_of: dict[int, range], places: dict[int, BufferPlace]) -> dict[int, range]:
    """Return from which op to which each buffer is needed; one of all rows that a group meets, for the whole group."""
    touched: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        met = range(index, index + 1)
        for number in {op.output, op.second, op.input} - {-1}:
            during = group_of.get(index, met) if places[number] == BufferPlace.ALL_ROWS else met
            touched.setdefault(number, []).extend((during.start, during.stop - 1))
    return {number: range(min(at), max(at) + 1) for number, at in touched.items()}


def _choose_places(ops: Sequence[Op], groups: Iterable[range], output: int) -> dict[int, BufferPlace]:
    places = {op.output: BufferPlace.ALL_ROWS for op in ops}
    for group in groups:
        places |= {ops[index].output: BufferPlace.PART_ROWS for index in group[:-1]}
    places |= {op.second: BufferPlace.FEWER_ROWS for op in ops if op.kind == OpKind.GATED_LINEAR}
    places[output] = BufferPlace.OUTPUT
    return places


def _place_first_fit(lives: dict[int, range], widths: Sequence[int]) -> dict[int, int]:
    """Return number → offset: the lowest that overlaps with no buffer that lives at the same time."""
    offsets: dict[int, int] = {}
    for number in sorted(lives, key=lambda n: (lives[n].start, n)):
        others = [n for n in offsets if lives[n].start < lives[number].stop and lives[number].start < lives[n].stop]
        offset = 0
        for other in sorted(others, key=offsets.__getitem__):
            if offset + _round_up(widths[number]) <= offsets[other]:
                break
            offset = max(offset, offsets[other] + _round_up(widths[other]))
        offsets[number] = offset
    return offsets


def _round_up(width: int) -> int:
    return -(-width // _LINE_FLOATS) * _LINE_FLOATS
