"""Shared by all packages: errors, console, signals, files, threads, arrays."""
