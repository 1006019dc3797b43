"""Layers whose weights tensor-parallel ranks share: what each holds, and what comes of all of them together."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.model_executor.runner import make_config
from tests.tiny_models import write_tiny_model
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import tensor_parallel
from vllm.exceptions import ModelLoadError
from vllm.model_executor.dtypes import ModelDtypes
from vllm.model_executor.layers.embedding import Embedding, compute_float32_product
from vllm.model_executor.layers.linear import Linear, WeightMatrix
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.weights import collect_slots
from vllm.ops.stored_weights import take_int8_rows, widen_rows

TYPES = {
    "float32": ModelDtypes(torch.float32, torch.float32),
    "bfloat16": ModelDtypes(torch.bfloat16, torch.float32),
    "int8": ModelDtypes(torch.int8, torch.float32),
}
every_type = pytest.mark.parametrize("kind", list(TYPES))
two_or_three = pytest.mark.parametrize("world_size", [2, 3])

HEAD = 8
SIZE = 96  # of three ranks each has one group of 32 columns
PARTS = {"q_proj": 12 * HEAD, "k_proj": 6 * HEAD, "v_proj": 6 * HEAD}
WEIGHTS = {f"{name}.weight": (rows, SIZE) for name, rows in PARTS.items()}
BIASES = {f"{name}.bias": (rows,) for name, rows in PARTS.items()}


class Holder(nn.Module):
    """Has one layer, as a model has many."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layer": layer})


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fill(make: Callable[[], WeightMatrix], tensors: dict[str, torch.Tensor]) -> WeightMatrix:
    layer = make()
    slots = collect_slots(Holder(layer))
    assert slots.keys() == tensors.keys()
    for parameter in layer.parameters():
        parameter.data.fill_(77)  # what is not written shows
    for name, tensor in tensors.items():
        assert slots[name].shape == tensor.shape
        slots[name].write(name, tensor)
    return layer


def fill_ranks(
    make: Callable[[], WeightMatrix], tensors: dict[str, torch.Tensor], world_size: int
) -> tuple[WeightMatrix, list[WeightMatrix]]:
    """Return the layer of one rank alone, and those of each of several."""
    ranks = []
    for rank in range(world_size):
        with tensor_parallel(rank, world_size):
            ranks.append(fill(make, tensors))
    return fill(make, tensors), ranks


def read(layer: WeightMatrix) -> torch.Tensor:
    """Return the weights as numbers."""
    if layer.weight_scale is None:
        return layer.weight.float()
    return widen_rows(take_int8_rows(layer.weight, torch.arange(layer.shape[0])), layer.weight_scale)


def interleave(whole: torch.Tensor, world_size: int, parts: dict[str, int]) -> list[torch.Tensor]:
    """Return each rank's rows of fused parts, cut out of all rows."""
    pieces = [part.chunk(world_size) for part in whole.split(list(parts.values()))]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(world_size)]


@every_type
@two_or_three
@pytest.mark.parametrize("is_fused", [False, True])
def test_column_parallel_ranks_hold_each_parts_rows_once(kind: str, world_size: int, is_fused: bool) -> None:
    def make() -> Linear:
        return Linear(SIZE, PARTS, has_bias=True, dtypes=TYPES[kind], is_fused=is_fused, shard="columns", unit=HEAD)

    tensors = draw(WEIGHTS | BIASES)
    if is_fused:  # in the checkpoint
        names = list(PARTS)
        tensors = {
            f"layer.{parameter}": torch.cat([tensors[f"{name}.{parameter}"] for name in names])
            for parameter in ("weight", "bias")
        }
    alone, ranks = fill_ranks(make, tensors, world_size)
    for rank, rows in enumerate(interleave(read(alone), world_size, PARTS)):
        assert torch.equal(read(ranks[rank]), rows)
    x = torch.randn(5, SIZE)
    for rank, columns in enumerate(interleave(alone(x).t(), world_size, PARTS)):
        torch.testing.assert_close(ranks[rank](x), columns.t(), rtol=1e-6, atol=1e-6)


@every_type
@two_or_three
def test_row_parallel_ranks_hold_each_column_once_and_their_products_add_up(kind: str, world_size: int) -> None:
    def make() -> Linear:
        return Linear(SIZE, 10, has_bias=True, dtypes=TYPES[kind], shard="rows", unit=HEAD)

    alone, ranks = fill_ranks(make, draw({"layer.weight": (10, SIZE), "layer.bias": (10,)}), world_size)
    assert torch.equal(torch.cat([read(layer) for layer in ranks], dim=1), read(alone))
    x = torch.randn(5, SIZE) / SIZE
    total = sum(layer(part) for layer, part in zip(ranks, x.chunk(world_size, dim=1), strict=True))
    torch.testing.assert_close(total, alone(x), rtol=1e-6, atol=1e-6)


@every_type
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_vocabulary_of_embedding_and_head(kind: str, world_size: int) -> None:
    def make() -> Embedding:
        return Embedding(50, SIZE, TYPES[kind])

    alone, ranks = fill_ranks(make, draw({"layer.weight": (50, SIZE)}), world_size)
    assert torch.equal(torch.cat([read(layer) for layer in ranks]), read(alone))
    ids = torch.tensor([0, 49, 16, 17, 24, 25, 3, 3])
    assert torch.equal(sum(layer(ids) for layer in ranks), alone(ids))
    assert torch.equal(ids, torch.tensor([0, 49, 16, 17, 24, 25, 3, 3])), "the caller's ids stay as they are"
    hidden = torch.randn(4, SIZE)
    logits = torch.cat([compute_float32_product(hidden, layer) for layer in ranks], dim=1)
    torch.testing.assert_close(logits, compute_float32_product(hidden, alone), rtol=1e-6, atol=1e-6)


def test_a_head_of_its_own_shares_the_vocabulary_too() -> None:
    def make() -> Linear:
        return Linear(SIZE, 50, dtypes=TYPES["float32"], shard="vocabulary")

    alone, ranks = fill_ranks(make, draw({"layer.weight": (50, SIZE)}), 3)
    assert torch.equal(torch.cat([read(layer) for layer in ranks]), read(alone))


@every_type
def test_key_heads_that_are_fewer_than_ranks_are_held_by_several(kind: str) -> None:
    parts = {"q_proj": 4 * HEAD, "k_proj": 2 * HEAD}
    tensors = draw({f"{name}.weight": (rows, SIZE) for name, rows in parts.items()})

    def make() -> Linear:
        return Linear(SIZE, parts, dtypes=TYPES[kind], shard="columns", unit=HEAD)

    alone, ranks = fill_ranks(make, tensors, 4)
    query, key = read(alone).split([4 * HEAD, 2 * HEAD])
    for rank, layer in enumerate(ranks):
        wanted = torch.cat([query.chunk(4)[rank], key.chunk(2)[rank // 2]])
        assert torch.equal(read(layer), wanted)


@every_type
@pytest.mark.parametrize("shard", ["columns", "rows"])
def test_a_tensor_that_is_the_ranks_own_part_is_taken_as_it_is(kind: str, shard: str) -> None:
    with tensor_parallel(1, 2):
        layer = Linear(64, 6, dtypes=TYPES[kind], shard=shard)  # type: ignore[arg-type]
    slot = collect_slots(Holder(layer))["layer.weight"]
    assert slot.shape == (6, 64) and slot.local == layer.shape == ((3, 64) if shard == "columns" else (6, 32))
    part = torch.randn(slot.local)
    slot.write("w", part)
    torch.testing.assert_close(
        read(layer),
        part.to(TYPES[kind].weights if kind == "bfloat16" else part.dtype).float(),
        rtol=0,
        atol=0.02 if kind == "int8" else 0,
    )
    with pytest.raises(ModelLoadError, match=r"shape \[6, 64\]; got \[5, 64\]"):
        slot.write("w", torch.randn(5, 64))


@pytest.mark.parametrize("shard", ["columns", "rows"])
def test_files_are_read_straight_into_memory_only_where_a_rank_holds_the_whole(shard: str) -> None:
    layers = {}
    for world_size in (1, 2):
        with tensor_parallel(world_size - 1, world_size):
            layers[world_size] = collect_slots(
                Holder(Linear(64, 6, has_bias=True, dtypes=TYPES["float32"], shard=shard))  # type: ignore[arg-type]
            )
    assert all(slot.find_memory() is not None for slot in layers[1].values())
    assert all(slot.find_memory() is None for slot in layers[2].values())


@two_or_three
def test_int8_rows_with_group_scales_are_shared_as_they_are_stored(world_size: int) -> None:
    elements = torch.randint(-127, 128, (7, SIZE * 2))
    scale = torch.rand(7, SIZE * 2 // 32)
    layers = []
    for rank, size in [(0, 1), *((rank, world_size) for rank in range(world_size))]:
        with tensor_parallel(rank, size):
            layer = Linear(SIZE * 2, 7, dtypes=TYPES["int8"], shard="rows")
        layer.use_group_scales()
        collect_slots(Holder(layer))["layer.weight"].write_int8(elements, scale)
        layers.append(layer)
    alone, *ranks = layers
    assert torch.equal(read(alone), widen_rows(elements, scale.t()))
    assert torch.equal(torch.cat([read(layer) for layer in ranks], dim=1), read(alone))
    rounded = torch.randn(7, SIZE * 2)
    for layer in layers:
        layer.write_rows(rounded, 0)
    assert torch.equal(torch.cat([read(layer) for layer in ranks], dim=1), read(alone))


def test_columns_that_cut_through_a_group_get_no_group_scales() -> None:
    with tensor_parallel(0, 2):
        assert not Linear(32, 4, dtypes=TYPES["int8"], shard="rows").can_have_group_scales
        assert Linear(64, 4, dtypes=TYPES["int8"], shard="rows").can_have_group_scales


def test_the_loader_gives_a_model_its_share_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    config = make_config(write_tiny_model(tmp_path, tokenizer=False))
    matrices = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        parallel = ParallelConfig(tensor_parallel_size=size, rank=rank)
        model = load_model(dataclasses.replace(config, parallel_config=parallel), torch.float32, torch.device("cpu"))
        matrices.append(model.get_submodule("model.embed_tokens"))
    alone, *ranks = (matrix.weight for matrix in matrices)
    assert torch.equal(torch.cat(ranks), alone) and len(ranks[0]) == len(alone) // 2
