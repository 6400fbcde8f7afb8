"""Damaged or forged stores and unusual texts: no error is missed."""
