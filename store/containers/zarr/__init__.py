"""Stores as Zarr v3 folders."""
