"""Judges: the kinds, what audits them, and the runner that has groups judged."""
