"""Reading a store, compared with other readers and other formats."""
