"""Stores that are damaged or forged, and texts that are odd: is anything missed?"""
