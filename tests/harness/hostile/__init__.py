"""The hostile-client campaign: malformed and adversarial requests against a proxy with API keys."""
