"""The headers of a Parquet file's pages, which say how much the pages unpack to.

pyarrow unpacks what these headers say, whatever the summary at the end of the file says of the same pages. They are
structures of Thrift's compact protocol: fields with their numbers, of which only sizes and counts are used here.
"""

from dataclasses import dataclass
from typing import Any

# Bytes read at once to find a header, and the most that one may have; texts in its statistics can be long.
_WINDOW, _LONGEST = 1 << 10, 1 << 24
_DEEPEST = 16
# Numbers of the fields of a page's header: sizes of the page, and the structures of data pages, whose first field is
# the number of values.
_UNPACKED, _PACKED, _DATA = 2, 3, (5, 8)
_VALUES = 1


@dataclass(frozen=True)
class Pages:
    """What the pages of one column in one row group unpack to."""

    bytes: int
    values: int


def pages_of(file: Any, start: int, stop: int) -> Pages:
    """Read the headers of the pages between two places of a file; raise ValueError if one is not valid."""
    total = values = 0
    while start < stop:
        found, length = _header_at(file, start)
        unpacked, packed = found.get((_UNPACKED,), -1), found.get((_PACKED,), -1)
        if unpacked < 0 or packed < 0:
            raise ValueError(f"the page at byte {start:,} has the sizes {unpacked:,} and {packed:,}")
        total += unpacked
        values += sum(max(0, found.get((field, _VALUES), 0)) for field in _DATA)
        start += length + packed
    return Pages(total, values)


def _header_at(file: Any, start: int) -> tuple[dict[tuple[int, ...], int], int]:
    """Return the numbers in the header at a place, by their fields, and the header's length."""
    size = _WINDOW
    while True:
        file.seek(start)
        data = file.read(size)
        parsing = _Parsing(data)
        try:
            parsing.structure(())
            return parsing.numbers, parsing.at
        except IndexError:
            if len(data) < size or size >= _LONGEST:
                raise ValueError(f"the page at byte {start:,} has no complete header") from None
            size *= 8


class _Parsing:
    """Reads a structure; raises IndexError if it goes on after the data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.numbers: dict[tuple[int, ...], int] = {}

    def structure(self, place: tuple[int, ...]) -> None:
        """Read the fields of a structure, which is itself the field at `place`."""
        if len(place) > _DEEPEST:
            raise ValueError("a page's header is nested too deeply")
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._signed()
            self._value(kind, (*place, number), in_list=False)

    def _value(self, kind: int, place: tuple[int, ...], in_list: bool) -> None:
        if kind in (1, 2):  # true and false: of a field, they are its type
            self.at += in_list
        elif kind == 3:
            self.at += 1
        elif kind in (4, 5, 6):
            self.numbers[place] = self._signed()
        elif kind == 7:
            self.at += 8
        elif kind == 8:
            self._skip(self._unsigned())
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            for _ in range(count):
                self._value(head & 15, (*place, 0), in_list=True)
                if self.at > len(self.data):
                    raise IndexError
        elif kind == 12:
            self.structure(place)
        else:
            raise ValueError(f"a page's header has a field of type {kind}")

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def _byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a page's header has a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
