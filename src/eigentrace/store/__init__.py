"""Storage of runs: the manifest, the shards of features and scores, and the Parquet tables."""

from eigentrace.store.folder import Folder
from eigentrace.store.shards import Record, Shard

__all__ = ["Folder", "Record", "Shard"]
