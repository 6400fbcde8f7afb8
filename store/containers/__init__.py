"""Store the arrays of a store as files: Zarr folders and HDF5 files behind one interface."""
