"""`student-sweep`: many students from one store, and one table of them."""

from student_train.sweep.cli import main as main
from student_train.sweep.table import aligned as aligned
from student_train.sweep.table import table as table
