"""`student-sweep`: many students from one store, and one table of them."""

from teachonce.student_train.sweep.cli import main as main
from teachonce.student_train.sweep.table import aligned as aligned
from teachonce.student_train.sweep.table import table as table
