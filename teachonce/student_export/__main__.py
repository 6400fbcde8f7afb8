"""Runs `student-export` with `python -m teachonce.student_export`."""

from teachonce.student_export.cli import main

main()
