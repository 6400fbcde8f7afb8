"""The formats that a student is exported to: how each is written, quantised and run."""
