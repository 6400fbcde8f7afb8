"""Runs `teacher-dump` with `python -m teachonce.teacher_dump`."""

from teachonce.teacher_dump.cli import main

main()
