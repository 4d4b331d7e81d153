"""The text of a response, which judges may also read as they read AgentScope's messages."""

from __future__ import annotations


class ResponseText(str):
    """A string with the method that AgentScope's messages have."""

    __slots__ = ()

    def get_text_content(self, separator: str = "\n") -> str:
        """Return the text, whose parts are joined already."""
        return str(self)
