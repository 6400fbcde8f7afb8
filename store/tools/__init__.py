"""Implements the commands of `feature-store`: verify, repair, copy, merge, info, show."""
