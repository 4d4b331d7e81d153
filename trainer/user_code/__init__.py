"""Loads and calls code of the user and of plug-ins."""
