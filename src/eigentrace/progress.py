"""A progress bar for long loops, shown after one second and only on a terminal."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, total: int | None = None, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Iterate over `items`, with a progress bar on a terminal after one second.

    Args:
        items: The iterable to loop over.
        description: Text in front of the bar.
        total: Sum of the sizes of all items, if known, to show the remaining time.
        size: Returns the size of an item; 1 by default.
    """
    with tqdm(desc=description, total=total, delay=1.0, disable=None, leave=False) as bar:
        for item in items:
            yield item
            bar.update(size(item))
