"""What `vllm score` writes, a JSON object a line, so that a run that was killed goes on where it stopped.

Beside OUT stands OUT.meta.json with the settings of the run: answers of different settings never share a file.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from vllm.exceptions import VLLMValidationError

_encode = msgspec.json.Encoder().encode


class Journal:
    """The output file: read back what is there, then append.

    Raises:
        VLLMValidationError: the file can't be written, is another process's, was not written by this command, or with
            other settings.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], *, overwrites: bool = False) -> None:
        self.path = pathlib.Path(name)
        self._meta_path = self.path.with_name(self.path.name + ".meta.json")
        self._file: BinaryIO
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise VLLMValidationError(f"--out {name} can't be written: {error.strerror or error}") from None
        try:
            self._lock()
            if overwrites:
                self._file.truncate(0)
            self._settle(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VLLMValidationError(f"--out {self.path} is being written by another process") from None
        except OSError:
            pass  # a file system without locks

    def _settle(self, settings: dict[str, Any]) -> None:
        """Write down the settings of a new file; compare those of an old one with ours."""
        if self._file.seek(0, os.SEEK_END) == 0:
            self._meta_path.write_bytes(msgspec.json.format(_encode(settings)) + b"\n")
            return
        try:
            known = msgspec.json.decode(self._meta_path.read_bytes())
        except (OSError, msgspec.DecodeError):
            raise VLLMValidationError(
                f"--out {self.path} is there and has no readable {self._meta_path.name} beside it: it was not written "
                "by vllm score. Name another file, or --overwrite it"
            ) from None
        names = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
        if names:
            differences = "; ".join(f"{name} was {known.get(name)!r}, is {settings.get(name)!r}" for name in names)
            raise VLLMValidationError(
                f"--out {self.path} was written with other settings ({differences}). Name another file, or --overwrite "
                "it",
                parameter=names[0],
            )

    def read_back(self) -> Iterator[dict[str, Any]]:
        """Yield the records that are there; what a killed run left half written at the end is cut off.

        Raises:
            VLLMValidationError: a line in the middle is no record.
        """
        self._file.seek(0)
        good_end = 0
        number = 0
        while line := self._file.readline():
            number += 1
            record = _decode_record(line)
            if record is None:
                if self._file.read(1):
                    raise VLLMValidationError(f"--out {self.path}: line {number} is no record of vllm score")
                break
            good_end += len(line)
            yield record
        self._file.truncate(good_end)
        self._file.seek(0, os.SEEK_END)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and have them on the disk: a batch is there as a whole or as its first lines."""
        self._file.write(b"".join(_encode(record) + b"\n" for record in records))
        self._file.flush()
        with contextlib.suppress(OSError):  # a pipe has no disk
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _decode_record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("line"), int) else None
