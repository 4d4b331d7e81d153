"""Building blocks without domain knowledge: threads, background tasks, byte quotas."""
