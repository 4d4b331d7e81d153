"""The swap campaign: adapter versions are swapped under load."""
