"""How the tree of a store lies in files: Zarr folders and HDF5 files behind one interface."""
