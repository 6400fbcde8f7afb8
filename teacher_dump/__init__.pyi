# The public names and where each is defined. This list is the only one: __init__.py reads it.

from teachonce.teacher_dump.job.dump import DumpSummary as DumpSummary
from teachonce.teacher_dump.job.dump import dump as dump
from teachonce.teacher_dump.job.options import DumpOptions as DumpOptions
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions as MixedVocabOptions
from teachonce.teacher_dump.mixed_vocab.options import StageOneDump as StageOneDump

__all__: list[str]
