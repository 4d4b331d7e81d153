"""Redaction of what is written down."""
