"""Ordered batches with stable row numbers, from datasets, loaders, streams or lists of batches."""

from eigentrace.data.accept import as_data
from eigentrace.data.ordered import Data
from eigentrace.data.sources import NOT_SINGLE, UNBATCHED, Batch

__all__ = ["NOT_SINGLE", "UNBATCHED", "Batch", "Data", "as_data"]
