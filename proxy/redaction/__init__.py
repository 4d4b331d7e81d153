"""Redaction of recorded calls and feedback."""
