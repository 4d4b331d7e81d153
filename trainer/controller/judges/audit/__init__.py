"""Audits of judges: lint, rescoring and calibration."""
