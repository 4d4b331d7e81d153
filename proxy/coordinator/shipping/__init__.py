"""Shipping: journal records are written to the store."""
