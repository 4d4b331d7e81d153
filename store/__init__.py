"""The database: its tables and the operations on them. It imports no other component.

`ratchet.store.store.open_store(url)` returns the one object that proxy, trainer, tuner and command line use. Every
operation is synchronous, is one transaction, and returns frozen records.
"""
