"""`student-sweep`: many students from one store, and one table of them."""

from teachonce.student_train.sweep.cli import main as main
