"""Failure tests of a proxy on two machines: network cuts and kills under load, checked in the store."""
