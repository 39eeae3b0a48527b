"""Decides whether a wheel may be published, and writes what is published with it."""
