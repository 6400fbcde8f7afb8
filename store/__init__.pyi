# The public names and where each stands. This list is the only one: __init__.py reads it.

from store.errors import StoreError as StoreError
from store.errors import Unreachable as Unreachable
from store.format.features import EmbeddingSpec as EmbeddingSpec
from store.format.features import Features as Features
from store.format.features import LogitsSpec as LogitsSpec
from store.format.features import TaskSpec as TaskSpec
from store.read.record import Logits as Logits
from store.read.record import Record as Record
from store.read.store import FeatureStore as FeatureStore
from store.read.store import open_store as open_store
from store.read.stream import Batch as Batch
from store.read.stream import HiddenBatch as HiddenBatch
from store.write.part import PartWriter as PartWriter
from store.write.writer import StoreWriter as StoreWriter
from support.errors import UserError as UserError

__all__: list[str]
