"""Upstream's own tests, as they are, run against this package under the name flash_attn."""
