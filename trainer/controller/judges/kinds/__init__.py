"""The kinds of judges."""
