"""Stores that are damaged or forged, texts that are odd, and runs that last: is anything missed?"""
