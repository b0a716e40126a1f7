"""A progress bar for loops that last: silent for the first second and when nobody is watching a terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items`, showing a bar on a terminal once a second has passed."""
    yield from tqdm(items, desc=description, total=total, delay=1.0, disable=None, leave=False)
