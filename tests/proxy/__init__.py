"""Claims about the front door, on real servers."""
