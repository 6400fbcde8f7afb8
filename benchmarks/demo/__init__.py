"""The demonstration: one dump and two students, compared in a table and a picture."""
