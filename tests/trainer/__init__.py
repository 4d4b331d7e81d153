"""Claims about the trainer."""
