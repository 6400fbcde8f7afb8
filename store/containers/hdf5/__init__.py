"""Stores as HDF5 files."""
