"""Output of the commands: the terminal, and files."""
