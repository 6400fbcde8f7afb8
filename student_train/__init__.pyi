# The public names and where each is defined. This list is the only one: __init__.py reads it.

from teachonce.student_train.batches import BatchSettings as BatchSettings
from teachonce.student_train.batches import StudentBatches as StudentBatches
from teachonce.student_train.data.batch import StudentBatch as StudentBatch
from teachonce.student_train.data.collator import Collator as Collator
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

__all__: list[str]
