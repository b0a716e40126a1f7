"""A progress bar for loops that last: silent for the first second and when nobody is watching a terminal."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, total: int | None = None, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Iterate over `items`, showing a bar on a terminal once a second has passed.

    Args:
        items: What to loop over.
        description: What the loop does.
        total: How much there is to do, if known, for a rate and the time left.
        size: How much of it an item is; one by default.
    """
    with tqdm(desc=description, total=total, delay=1.0, disable=None, leave=False) as bar:
        for item in items:
            yield item
            bar.update(size(item))
