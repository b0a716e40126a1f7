"""A run on disk: its manifest, its shards of features, and the tables beside them."""

from eigentrace.store.folder import Folder
from eigentrace.store.shards import Record, Shard

__all__ = ["Folder", "Record", "Shard"]
