"""The API keys in use and their callers."""
