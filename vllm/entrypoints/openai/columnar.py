"""Logprobs as columns: four arrays in base64 instead of a JSON object an entry (`logprobs_format: "columnar"`).

A position of the whole vocabulary is some hundred kilobytes this way, and a megabyte as JSON. Values are exact: −inf
stays −inf, since it is not JSON that holds them.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from vllm.logprobs import FlatLogprobs

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ColumnarLogprobs:
    """Positions in order: position i is entries offsets[i] … offsets[i + 1] − 1, the chosen token first.

    A position without scores (a prompt's first one) has no entries. Numbers are little-endian; in JSON the bytes are
    base64.
    """

    offsets: bytes  # int64, one more than there are positions
    ids: bytes  # int32, one an entry, like the next two
    values: bytes  # float32
    ranks: bytes  # int32
    format: str = "columnar"

    @classmethod
    def of(cls, scores: FlatLogprobs) -> "ColumnarLogprobs":
        """Return these positions as columns."""
        columns = scores.to_numpy()
        return cls(
            columns.row_starts.astype("<i8", copy=False).tobytes(),
            columns.token_ids.astype("<i4", copy=False).tobytes(),
            columns.logprobs.astype("<f4", copy=False).tobytes(),
            columns.ranks.astype("<i4", copy=False).tobytes(),
        )

    def followed_by(self, other: "ColumnarLogprobs") -> "ColumnarLogprobs":
        """Return the positions of both."""
        mine, others = np.frombuffer(self.offsets, "<i8"), np.frombuffer(other.offsets, "<i8")
        return ColumnarLogprobs(
            np.concatenate((mine, others[1:] + mine[-1])).tobytes(),
            self.ids + other.ids,
            self.values + other.values,
            self.ranks + other.ranks,
        )

    def encode(self) -> msgspec.Raw:
        """Return it as JSON."""
        return msgspec.Raw(_encode(self))
