"""The face: the `ratchet` command, and what it needs to start, watch and stop the services. Thin.

Promises that importing it costs next to nothing: `ratchet --help` answers in well under half a second.
"""

__version__ = "0.1.0"
