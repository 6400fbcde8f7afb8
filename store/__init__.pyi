# The public names and where each is defined. This list is the only one: __init__.py reads it.

from teachonce.store.errors import StoreError as StoreError
from teachonce.store.errors import Unreachable as Unreachable
from teachonce.store.format.features import EmbeddingSpec as EmbeddingSpec
from teachonce.store.format.features import Features as Features
from teachonce.store.format.features import LogitsSpec as LogitsSpec
from teachonce.store.format.features import TaskSpec as TaskSpec
from teachonce.store.format.sequences import Sequences as Sequences
from teachonce.store.read.record import Logits as Logits
from teachonce.store.read.record import Record as Record
from teachonce.store.read.store import FeatureStore as FeatureStore
from teachonce.store.read.store import open_store as open_store
from teachonce.store.read.stream import Batch as Batch
from teachonce.store.read.stream import HiddenBatch as HiddenBatch
from teachonce.store.write.part import PartWriter as PartWriter
from teachonce.store.write.writer import StoreWriter as StoreWriter
from teachonce.support.errors import UserError as UserError

__all__: list[str]
