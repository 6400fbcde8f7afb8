"""Errors that are written for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """One line: what is wrong, where, what was expected and found, what to do next."""


class StoreError(UserError):
    """A feature store that is missing, unfinished, damaged, of another version, or badly fed."""
