"""Linking: which trajectory a call belongs to, and which earlier answer it continues."""
