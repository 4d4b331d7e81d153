"""The commands: one file per subject; each parses, calls and prints."""
