# The public names and where each stands. This list is the only one: __init__.py reads it.

from align import Alignment as Alignment
from align import AlignmentError as AlignmentError
from align import FlatText as FlatText
from align import Reduced as Reduced
from align import Tokens as Tokens
from align import Vocabulary as Vocabulary
from align import VocabularyMap as VocabularyMap
from align import align_match as align_match
from align import align_reduce as align_reduce
from align import align_span as align_span
from store import Batch as Batch
from store import EmbeddingSpec as EmbeddingSpec
from store import Features as Features
from store import FeatureStore as FeatureStore
from store import HiddenBatch as HiddenBatch
from store import Logits as Logits
from store import LogitsSpec as LogitsSpec
from store import PartWriter as PartWriter
from store import Record as Record
from store import StoreError as StoreError
from store import StoreWriter as StoreWriter
from store import TaskSpec as TaskSpec
from store import Unreachable as Unreachable
from store import UserError as UserError
from store import open_store as open_store
from student_train.batches import StudentBatches as StudentBatches
from student_train.data.batch import StudentBatch as StudentBatch
from student_train.model.any_student import OwnStudent as OwnStudent
from student_train.output.pruning import prune_student as prune_student
from student_train.output.run import prepare as prepare
from student_train.output.run import run as run
from student_train.settings.options import TrainOptions as TrainOptions
from student_train.train.distiller import Distiller as Distiller
from student_train.train.distiller import Sides as Sides
from student_train.train.student_training import Trained as Trained
from student_train.train.student_training import train as train
from teacher_dump.job.dump import DumpSummary as DumpSummary
from teacher_dump.job.dump import dump as dump
from teacher_dump.job.options import DumpOptions as DumpOptions

from . import losses as losses

__version__: str
__all__: list[str]
