"""Fixtures of the plug-ins' tests: those of Ratchet's own tests."""

from tests.conftest import migrated, no_certificates, store_file
from tests.ratchet.conftest import project
from tests.trainer.conftest import engine, make_controller, store, tiny_model

__all__ = ["engine", "make_controller", "migrated", "no_certificates", "project", "store", "store_file", "tiny_model"]
