"""Reading a store, beside other readers and other formats."""
