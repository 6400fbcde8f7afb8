"""The feature store: what a teacher knew about every token, in chunks. See FORMAT.md."""

from store.errors import StoreError
from store.format.features import Features, LogitsSpec, TaskSpec
from store.read.record import Logits, Record
from store.read.store import FeatureStore, open_store
from store.read.stream import Batch, HiddenBatch
from store.write.part import PartWriter
from store.write.writer import StoreWriter
from support.errors import UserError

__all__ = [
    "Batch",
    "FeatureStore",
    "Features",
    "HiddenBatch",
    "Logits",
    "LogitsSpec",
    "PartWriter",
    "Record",
    "StoreError",
    "StoreWriter",
    "TaskSpec",
    "UserError",
    "open_store",
]
