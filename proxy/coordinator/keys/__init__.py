"""The API keys in use, and who a key belongs to."""
