"""The durability campaign: `kill -9` and database outages under load."""
