"""Tests of the proxy against real servers."""
