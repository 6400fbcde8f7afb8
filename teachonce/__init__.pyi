# The public names and the modules that define them. __init__.py reads this list.

from teachonce.align import Alignment as Alignment
from teachonce.align import AlignmentError as AlignmentError
from teachonce.align import FlatText as FlatText
from teachonce.align import Reduced as Reduced
from teachonce.align import Tokenizations as Tokenizations
from teachonce.align import Tokens as Tokens
from teachonce.align import Vocabulary as Vocabulary
from teachonce.align import VocabularyMap as VocabularyMap
from teachonce.align import align_bytes as align_bytes
from teachonce.align import align_match as align_match
from teachonce.align import align_reduce as align_reduce
from teachonce.align import align_span as align_span
from teachonce.store import Batch as Batch
from teachonce.store import EmbeddingSpec as EmbeddingSpec
from teachonce.store import Features as Features
from teachonce.store import FeatureStore as FeatureStore
from teachonce.store import HiddenBatch as HiddenBatch
from teachonce.store import Logits as Logits
from teachonce.store import LogitsSpec as LogitsSpec
from teachonce.store import PartWriter as PartWriter
from teachonce.store import Record as Record
from teachonce.store import Sequences as Sequences
from teachonce.store import StoreError as StoreError
from teachonce.store import StoreWriter as StoreWriter
from teachonce.store import TaskSpec as TaskSpec
from teachonce.store import Unreachable as Unreachable
from teachonce.store import UserError as UserError
from teachonce.store import open_store as open_store
from teachonce.student_train.batches import BatchSettings as BatchSettings
from teachonce.student_train.batches import StudentBatches as StudentBatches
from teachonce.student_train.data.batch import StudentBatch as StudentBatch
from teachonce.student_train.model.any_student import OwnStudent as OwnStudent
from teachonce.student_train.output.pruned_folder import prune_student as prune_student
from teachonce.student_train.output.run import run as run
from teachonce.student_train.prepared_student import prepare as prepare
from teachonce.student_train.settings.options import TrainOptions as TrainOptions
from teachonce.student_train.sweep.table import StudentTable as StudentTable
from teachonce.student_train.sweep.table import student_table as student_table
from teachonce.student_train.train.distiller import Distiller as Distiller
from teachonce.student_train.train.sides import Sides as Sides
from teachonce.student_train.train.student_training import Trained as Trained
from teachonce.student_train.train.student_training import train as train
from teachonce.teacher_dump.job.dump import DumpSummary as DumpSummary
from teachonce.teacher_dump.job.dump import dump as dump
from teachonce.teacher_dump.job.options import DumpOptions as DumpOptions

from . import losses as losses

__version__: str
__all__: list[str]
