"""Runs `feature-store` with `python -m teachonce.feature_store`."""

from teachonce.feature_store.cli import main

main()
