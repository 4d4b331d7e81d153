"""Metrics, logs and alarms of the proxy."""
