"""Tests of the example agent, its world, its judge and its policy. No engine is started here."""
