"""The records that the worker and the coordinator exchange."""
