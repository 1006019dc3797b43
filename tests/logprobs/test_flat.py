"""FlatLogprobs must read like the list of dictionaries that it stands for, whatever it was made from."""

import copy
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.logprobs.block import WholeRows
from vllm.logprobs.rows import NO_SCORES, Row

VOCAB = 7
Entries = list[tuple[int, float, int]]  # token id, value, rank: in reading order
Positions = list[dict[int, Logprob] | None]


def for_all(*strategies: Any) -> Any:
    """A property: the same 40 examples each time."""
    return lambda test: settings(max_examples=40, deadline=None, derandomize=True)(given(*strategies)(test))


class RowAndToken:
    """Texts that tell which row and token were asked for, and how often anything was."""

    def __init__(self) -> None:
        self.num_calls = 0

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> list[str]:
        self.num_calls += 1
        return [f"{row_index}:{token_id}" for token_id in token_ids]


def make_model(rows: Sequence[Entries | None], has_text: bool = True, first_row: int = 0) -> Positions:
    return [
        None if row is None else {t: Logprob(v, r, f"{first_row + i}:{t}" if has_text else None) for t, v, r in row}
        for i, row in enumerate(rows)
    ]


def make_flat(rows: Sequence[Entries | None]) -> FlatLogprobs:
    """Build frozen rows in reading order, without texts; None in front or between becomes an empty row."""
    flat = [entry for row in rows for entry in row or []]
    return FlatLogprobs.from_arrays(
        np.cumsum([0, *(len(row or []) for row in rows)]),
        np.array([entry[0] for entry in flat], np.int32),
        np.array([entry[1] for entry in flat], np.float32),
        np.array([entry[2] for entry in flat], np.int32),
    )


def score(logits: Sequence[float], chosen: int, k: int) -> Entries:
    """Score one row in plain Python: chosen first, then the k most likely, ties by the lower id."""
    falling = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    order = [chosen, *(token_id for token_id in falling[:k] if token_id != chosen)]
    return [(token_id, logits[token_id], falling.index(token_id) + 1) for token_id in order]


# multiples of 1/4 are exact in float32, and few of them tie often
logit_rows = st.lists(st.integers(-8, 0).map(lambda x: x / 4), min_size=VOCAB, max_size=VOCAB)
scored_rows = st.builds(score, logit_rows, st.integers(0, VOCAB - 1), st.integers(0, VOCAB))
ragged_rows = st.lists(scored_rows | st.none(), max_size=12)
whole_rows = st.lists(st.tuples(logit_rows, st.integers(0, VOCAB - 1)), max_size=5)
slices = st.builds(
    slice,
    st.none() | st.integers(-15, 15),
    st.none() | st.integers(-15, 15),
    st.none() | st.sampled_from([-5, -3, -2, -1, 1, 2, 3, 5]),
)


def assert_reads_like(flat: FlatLogprobs, model: Positions) -> None:
    assert len(flat) == len(model)
    assert list(flat) == model == flat.to_list()
    assert flat == model
    for i, row in enumerate(model):
        assert flat[i] == row == flat[i - len(model)]
        assert list(flat[i] or ()) == list(row or ()), "the chosen token stands first, then the order of the row"
        row_ids, row_values, row_ranks = flat.row_values(i)
        assert row_ids.tolist() == list(row or ())
        assert row_values.tolist() == [entry.logprob for entry in (row or {}).values()]
        assert row_ranks.tolist() == [entry.rank for entry in (row or {}).values()]
    chosen = flat.chosen_values()
    assert chosen.dtype == np.float32 and len(chosen) == len(model)
    for value, row in zip(chosen, model, strict=True):
        assert np.isnan(value) if row is None else value == next(iter(row.values())).logprob


def make_whole(rows: Sequence[tuple[list[float], int]]) -> tuple[FlatLogprobs, list[Entries]]:
    values = np.array([logits for logits, _ in rows], np.float32).reshape(len(rows), VOCAB)
    entries = [score(logits, chosen, VOCAB) for logits, chosen in rows]
    ranks = np.zeros((len(rows), VOCAB), np.int32)
    for i, row in enumerate(entries):
        for token_id, _, rank in row:
            ranks[i, token_id] = rank
    whole = WholeRows(np.array([chosen for _, chosen in rows], np.int32), values, ranks)
    return FlatLogprobs.of_rows(whole.split()), entries


@for_all(ragged_rows)
def test_ragged_rows_read_like_the_list_of_dictionaries(rows: list[Entries | None]) -> None:
    assert_reads_like(make_flat(rows), make_model(rows, has_text=False))
    assert_reads_like(make_flat(rows).with_text(RowAndToken()), make_model(rows))


@for_all(whole_rows, st.integers(0, 2))
def test_whole_vocabulary_rows_in_id_order_read_chosen_first_then_falling(
    rows: list[tuple[list[float], int]], num_none: int
) -> None:
    flat, entries = make_whole(rows)
    flat = flat.with_none_positions(num_none)
    assert flat.num_none == num_none
    assert_reads_like(flat.with_text(RowAndToken()), make_model([None] * num_none + entries))


@for_all(scored_rows, slices)
def test_one_row_as_a_stream_brings_it_reads_like_a_sequence_of_one(row: Entries, which: slice) -> None:
    packed = make_flat([row])._list_rows()[0]
    assert isinstance(packed, bytes)
    flat, model = FlatLogprobs.of_one_row(packed, RowAndToken(), 5), make_model([row], first_row=5)
    assert flat.is_frozen and flat.num_none == 0
    assert_reads_like(flat, model)
    assert_reads_like(flat[which], model[which])
    assert_reads_like(pickle.loads(pickle.dumps(flat)), model)
    assert_reads_like(flat.with_none_positions(1), [None, *model])
    assert_reads_like(flat + flat, model + model)


@for_all(ragged_rows, slices, slices)
def test_a_slice_of_any_step_keeps_the_texts_of_its_own_rows(
    rows: list[Entries | None], one: slice, two: slice
) -> None:
    flat, model = make_flat(rows).with_text(RowAndToken()), make_model(rows)
    assert_reads_like(flat[one], model[one])
    assert_reads_like(flat[one][two], model[one][two])
    assert list(reversed(flat)) == model[::-1]


@for_all(whole_rows, slices)
def test_a_slice_of_whole_vocabulary_rows(rows: list[tuple[list[float], int]], which: slice) -> None:
    flat, entries = make_whole(rows)
    prompt = flat.with_none_positions(1).with_text(RowAndToken())
    assert_reads_like(prompt[which], make_model([None, *entries])[which])


@for_all(ragged_rows, whole_rows, ragged_rows)
def test_concatenation_keeps_every_row_whatever_the_parts_are_made_of(
    first: list[Entries | None], whole: list[tuple[list[float], int]], last: list[Entries | None]
) -> None:
    whole_flat, entries = make_whole(whole)
    parts = [make_flat(first).with_text(RowAndToken()), whole_flat.with_none_positions(1), make_flat(last)]
    joined = FlatLogprobs.concatenate(parts)
    assert_reads_like(joined, make_model(first) + make_model([None, *entries, *last], has_text=False))
    assert joined == parts[0] + parts[1] + parts[2]


@for_all(ragged_rows, st.data())
def test_pieces_joined_equal_the_whole_and_still_read_their_text_late(
    rows: list[Entries | None], data: st.DataObject
) -> None:
    texts = RowAndToken()
    whole = make_flat(rows).with_text(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    joined = FlatLogprobs.concatenate(
        [whole[first:end] for first, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    )
    assert texts.num_calls == 0, "joining what belongs together must not decode"
    assert_reads_like(joined, make_model(rows))


@for_all(ragged_rows, st.integers(0, 6), st.integers(0, 6))
def test_pieces_joined_out_of_order_keep_the_texts_of_their_own_rows(
    rows: list[Entries | None], head: int, tail: int
) -> None:
    flat, model = make_flat(rows).with_text(RowAndToken()), make_model(rows)
    assert_reads_like(flat[tail:] + flat[:head], model[tail:] + model[:head])
    assert_reads_like(flat[::2] + flat[1::2], model[::2] + model[1::2])


@for_all(whole_rows, st.integers(0, 5), st.integers(0, 5))
def test_rows_taken_from_the_middle_stay_what_they_were(
    rows: list[tuple[list[float], int]], one: int, two: int
) -> None:
    flat, entries = make_whole(rows)
    first, end = sorted((min(one, len(rows)), min(two, len(rows))))
    taken = flat.with_text(RowAndToken()).take_rows(first, end)
    assert_reads_like(taken, make_model(entries)[first:end])
    assert_reads_like(make_flat(entries).take_rows(first, end), make_model(entries, has_text=False)[first:end])


def test_positions_without_scores_put_in_front_do_not_shift_the_texts() -> None:
    flat = make_flat([[(4, -1.0, 1)], [(5, -1.0, 1)]]).with_text(RowAndToken(), first_row=3).with_none_positions(2)
    assert flat == [None, None, {4: Logprob(-1.0, 1, "3:4")}, {5: Logprob(-1.0, 1, "4:5")}]
    assert flat[2:].num_none == 0 and flat.num_none == 2


@for_all(ragged_rows, slices)
def test_pickle_and_deepcopy_store_the_texts(rows: list[Entries | None], which: slice) -> None:
    flat = make_flat(rows).with_text(RowAndToken())[which]
    for twin in (
        pickle.loads(pickle.dumps(flat)),
        copy.deepcopy(flat),
        pickle.loads(pickle.dumps(copy.deepcopy(flat))),
    ):
        assert_reads_like(twin, make_model(rows)[which])
        assert_reads_like(twin[::-1], make_model(rows)[which][::-1])
        assert twin.is_frozen
    assert copy.copy(flat) is flat


@for_all(whole_rows)
def test_pickle_of_whole_vocabulary_rows_stores_the_texts(rows: list[tuple[list[float], int]]) -> None:
    flat, entries = make_whole(rows)
    assert_reads_like(pickle.loads(pickle.dumps(flat.with_text(RowAndToken()))), make_model(entries))


@for_all(ragged_rows)
def test_the_parallel_lists_rebuild_the_same_positions_in_vllms_constructor(rows: list[Entries | None]) -> None:
    flat = make_flat(rows).with_text(RowAndToken())
    columns: Any = (
        flat.start_indices,
        flat.end_indices,
        flat.token_ids,
        flat.logprobs,
        flat.ranks,
        flat.decoded_tokens,
    )
    rebuilt = FlatLogprobs(*columns)
    assert not rebuilt.is_frozen
    assert_reads_like(rebuilt, make_model(rows))
    arrays = flat[1:].to_arrays()
    assert arrays.row_starts[0] == 0 and arrays.row_starts[-1] == len(arrays.token_ids)
    assert arrays.values.tolist() == flat[1:].logprobs and arrays.ranks.tolist() == flat[1:].ranks


@for_all(ragged_rows, slices)
def test_one_that_grows_reads_the_same_as_a_frozen_one(rows: list[Entries | None], which: slice) -> None:
    model = make_model(rows)
    grown = FlatLogprobs()
    for row in model[: len(model) // 2]:
        grown.append(row)
    grown.extend(model[len(model) // 2 :])
    assert_reads_like(grown, model)
    assert_reads_like(grown[which], model[which])
    assert grown == make_flat(rows).with_text(RowAndToken())
    for twin in (pickle.loads(pickle.dumps(grown)), copy.deepcopy(grown), copy.copy(grown)):
        twin.append(None)
        assert_reads_like(twin, [*model, None])
    assert_reads_like(grown, model)
    assert grown + make_flat(rows) == model + make_model(rows, has_text=False)


blocks_of_any_kind = st.lists(whole_rows | st.lists(scored_rows, max_size=3), max_size=5)


@for_all(blocks_of_any_kind, st.integers(0, 2))
def test_what_is_read_of_a_list_of_rows_never_grows_with_it(blocks: list[list[Any]], num_none: int) -> None:
    """Rows of entries and of the whole vocabulary in any mixture."""
    rows: list[Row] = [NO_SCORES] * num_none
    texts = RowAndToken()
    gathered: list[Entries | None] = [None] * num_none
    snapshots = [(FlatLogprobs.of_rows(rows, texts), list(gathered))]
    for block in blocks:
        flat, entries = make_whole(block) if block and isinstance(block[0], tuple) else (make_flat(block), block)
        rows += flat._list_rows()
        gathered.extend(entries)
        snapshots.append((FlatLogprobs.of_rows(rows, texts), list(gathered)))
    for snapshot, rows_then in snapshots:
        assert_reads_like(snapshot, make_model(rows_then))
        tail = snapshots[-1][0][len(rows_then) :]
        assert_reads_like(tail, make_model(gathered[len(rows_then) :], first_row=len(rows_then)))


@for_all(st.lists(st.lists(scored_rows, max_size=3), min_size=1, max_size=5))
def test_deltas_join_to_the_whole_however_often_they_are_joined(blocks: list[list[Entries]]) -> None:
    texts = RowAndToken()
    pieces = [FlatLogprobs.of_rows([NO_SCORES], texts)]
    for block in blocks:
        pieces.append(FlatLogprobs.of_rows(make_flat(block)._list_rows(), texts, sum(map(len, pieces))))
    joined = FlatLogprobs.concatenate(pieces)
    one_by_one = pieces[0]
    for piece in pieces[1:]:
        one_by_one += piece
    assert texts.num_calls == 0
    for whole in (joined, one_by_one):
        assert whole._get_texts() == (texts, 0), "HTTP asks it for bytes, too"
        assert_reads_like(whole, make_model([None, *(row for rows in blocks for row in rows)]))


def test_rows_of_several_sequences_joined_again_and_again_keep_their_texts() -> None:
    part = make_flat([[(1, -1.0, 1)]]).with_text(RowAndToken(), first_row=7)
    joined = part
    for _ in range(2000):
        joined = FlatLogprobs.concatenate([joined, part])
    assert joined[1999] == {1: Logprob(-1.0, 1, "7:1")}


def test_rows_that_are_taken_keep_no_larger_array_alive() -> None:
    whole, _ = make_whole([([0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0], i) for i in range(4)])
    taken = whole.take_rows(1, 3)
    assert taken == whole[1:3]
    for mine, theirs in zip(taken._list_rows(), whole._list_rows()[1:3], strict=True):
        assert not isinstance(mine, bytes) and not isinstance(theirs, bytes)
        for column, other in zip(mine[1:], theirs[1:], strict=True):
            assert not np.shares_memory(column, other)


def test_a_value_is_the_float32_that_was_computed_as_a_python_float() -> None:
    value = np.float32(-0.1)
    entry = make_flat([[(5, float(value), 1)]])[0]
    assert entry is not None
    assert type(entry[5].logprob) is float and entry[5].logprob == float(value)
    assert type(next(iter(entry))) is int and type(entry[5].rank) is int


def test_texts_are_asked_for_only_when_somebody_looks_and_only_for_that_row() -> None:
    texts = RowAndToken()
    flat = make_flat([[(1, -1.0, 1)], [(2, -2.0, 1)], [(3, -3.0, 1)]]).with_text(texts, first_row=10)
    assert len(flat) == 3 and len(flat[1:]) == 2 and flat.chosen_values()[2] == -3.0
    assert texts.num_calls == 0
    assert flat[1:][0] == {2: Logprob(-2.0, 1, "11:2")}
    assert texts.num_calls == 1


@pytest.mark.parametrize(
    "mutate",
    [
        lambda flat: flat.append(None),
        lambda flat: flat.append_fast([1], [-1.0], [1], [None]),
        lambda flat: flat.extend([]),
        lambda flat: flat.extend([{1: Logprob(-1.0)}]),
        lambda flat: flat.insert(0, None),
        lambda flat: flat.__setitem__(0, None),
        lambda flat: flat.__delitem__(0),
        lambda flat: flat.pop(),
        lambda flat: flat.remove(flat[0]),
        lambda flat: flat.clear(),
        lambda flat: flat.reverse(),
    ],
)
def test_what_the_engine_made_is_frozen(mutate: Any) -> None:
    flat = make_flat([[(1, -1.0, 1)]])
    with pytest.raises(TypeError, match=r"to_list\(\)"):
        mutate(flat)
    assert flat == [{1: Logprob(-1.0, 1)}]
    with pytest.raises(ValueError, match="read-only"):
        flat.row_values(0).values[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        flat.chosen_values()[0] = 0


def test_adding_a_list_gives_a_list_and_plus_equals_leaves_the_frozen_one_alone() -> None:
    flat, plain = make_flat([[(1, -1.0, 1)]]), [{2: Logprob(-2.0, 1)}]
    assert flat + plain == [*flat, *plain] and type(flat + plain) is list
    assert plain + flat == [*plain, *flat] and type(plain + flat) is list
    gathered: Any = flat
    gathered += make_flat([[(3, -3.0, 1)]])
    assert gathered == [{1: Logprob(-1.0, 1)}, {3: Logprob(-3.0, 1)}] and len(flat) == 1
    plain += flat
    assert plain == [{2: Logprob(-2.0, 1)}, {1: Logprob(-1.0, 1)}]
    assert {1: Logprob(-1.0, 1)} in flat and None not in flat and flat.index({1: Logprob(-1.0, 1)}) == 0


def test_indices_follow_the_rules_of_a_list() -> None:
    flat = make_flat([[(1, -1.0, 1)], None])
    assert flat[-2] == {1: Logprob(-1.0, 1)} and flat[np.int64(1)] is None
    for i in (2, -3):
        with pytest.raises(IndexError):
            flat[i]
    with pytest.raises(TypeError, match="str"):
        flat["0"]  # type: ignore[call-overload]
    assert (flat == "no list") is False and flat != [None] and flat != [None, None]
    with pytest.raises(TypeError):
        hash(flat)


def test_vllms_layout_with_the_chosen_token_stored_twice_reads_as_one_entry_in_first_place() -> None:
    flat = FlatLogprobs()
    flat.append_fast([7, 9, 7], [-0.5, -0.25, -0.5], [9, 1, 2], ["a", "b", "a"])
    assert flat.start_indices == [0] and flat.end_indices == [3] and flat.token_ids == [7, 9, 7]
    row = flat[0]
    assert row == {7: Logprob(-0.5, 2, "a"), 9: Logprob(-0.25, 1, "b")} and list(row) == [7, 9]


def test_one_that_grows_keeps_the_callers_own_floats_and_missing_ranks() -> None:
    flat = FlatLogprobs()
    flat.append({1: Logprob(-0.1)})
    assert flat[0] == {1: Logprob(-0.1, None, None)}


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5000])
def test_repr_stays_within_a_screen(num_rows: int) -> None:
    texts = RowAndToken()
    flat = make_flat([[(t, -t / 4, t + 1) for t in range(100)]] * num_rows).with_text(texts)
    shown = repr(flat)
    assert shown.startswith(f"FlatLogprobs({num_rows} positions: [") and len(shown) < 1000
    assert shown.count("rank 1") == min(num_rows, 3)


def test_rows_of_the_whole_vocabulary_are_not_copied_before_they_are_read() -> None:
    """No dictionary, list or copy of the entries is made: the object holds the arrays that it was given."""
    values, ranks = np.zeros((2, 10**6), np.float32), np.ones((2, 10**6), np.int32)
    flat = FlatLogprobs.of_rows(WholeRows(np.zeros(2, np.int32), values, ranks).split())
    for i, row in enumerate(flat[:]._list_rows()):
        assert not isinstance(row, bytes)
        assert np.shares_memory(row.values, values[i]) and np.shares_memory(row.ranks, ranks[i])


# ---------------------------------------------------------------- columns


def make_columns_case() -> FlatLogprobs:
    token_ids, values = np.array([7, 3, 7, 9], np.int32), np.array([-0.5, -1.5, -np.inf, -0.25], np.float32)
    rows = FlatLogprobs.from_arrays(np.array([0, 2, 3, 4]), token_ids, values, np.array([1, 2, 9, 1], np.int32))
    return rows.with_none_positions(1)


def test_numpy_columns_are_compact_and_the_callers_own() -> None:
    flat = make_columns_case()
    for part, starts, ids in ((flat, [0, 0, 2, 3, 4], [7, 3, 7, 9]), (flat[2:], [0, 1, 2], [7, 9])):
        columns = part.to_numpy()
        assert columns._fields == ("row_starts", "token_ids", "logprobs", "ranks")
        assert [column.dtype for column in columns] == [np.int64, np.int32, np.float32, np.int32]
        assert columns.row_starts.tolist() == starts and columns.token_ids.tolist() == ids
        columns.logprobs[:] = 0  # theirs to change
    assert flat[1][7].logprob == -0.5


def test_numpy_columns_of_the_whole_vocabulary_are_in_reading_order() -> None:
    values = np.array([[-3.0, -1.0, -2.0], [-0.5, -0.75, -9.0]], np.float32)
    ranks = np.array([[3, 1, 2], [1, 2, 3]], np.int32)
    columns = FlatLogprobs.of_rows(WholeRows(np.array([2, 0], np.int32), values, ranks).split()).to_numpy()
    assert columns.token_ids.tolist() == [2, 1, 0, 0, 1, 2]
    assert columns.logprobs.tolist() == [-2.0, -1.0, -3.0, -0.5, -0.75, -9.0]
    assert columns.ranks.tolist() == [2, 1, 3, 1, 2, 3]


def test_an_arrow_table_has_a_row_a_position() -> None:
    table = make_columns_case().to_arrow()
    assert table.column_names == ["token_ids", "logprobs", "ranks"]
    assert table["token_ids"].to_pylist() == [None, [7, 3], [7], [9]]
    assert table["logprobs"].to_pylist() == [None, [-0.5, -1.5], [-np.inf], [-0.25]]
    assert table["ranks"].to_pylist() == [None, [1, 2], [9], [1]]


def test_without_pyarrow_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(ImportError, match="pip install pyarrow"):
        make_columns_case().to_arrow()
