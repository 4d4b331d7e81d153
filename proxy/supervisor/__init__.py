"""Runs a proxy as several processes: workers, and the coordinator that they ask."""
