"""Reporting: what the store's figures tell, for every room that shows them. Pure statistics; no room is known here."""
