"""Runs `student-predict` with `python -m teachonce.student_predict`."""

from teachonce.student_predict.cli import main

main()
