"""Runs `downstream` with `python -m teachonce.downstream`."""

from teachonce.downstream.cli import main

main()
