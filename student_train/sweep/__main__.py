"""Runs `student-sweep` with `python -m teachonce.student_train.sweep`."""

from teachonce.student_train.sweep.cli import main

main()
