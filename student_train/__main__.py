"""Runs `student-train` with `python -m teachonce.student_train`."""

from teachonce.student_train.cli import main

main()
