"""The feature store: what a teacher knew about every token, in chunks. See FORMAT.md."""

from store.errors import StoreError, UserError
from store.features import Features, LogitsSpec, TaskSpec
from store.part_writer import PartWriter
from store.reader import FeatureStore, open_store
from store.record import Logits, Record
from store.stream import Batch, HiddenBatch
from store.writer import StoreWriter

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
