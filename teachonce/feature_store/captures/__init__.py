"""Captures that other tools have made of a teacher: read into stores, and written from them."""
