"""Ordered batches with stable row numbers, from whatever torch users have at hand."""

from eigentrace.data.accept import as_data
from eigentrace.data.ordered import Data
from eigentrace.data.sources import NOT_SINGLE, UNBATCHED, Batch

__all__ = ["NOT_SINGLE", "UNBATCHED", "Batch", "Data", "as_data"]
