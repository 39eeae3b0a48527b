"""Implementations of attention by name, all with the signature of torch's."""
