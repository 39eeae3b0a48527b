"""Identical trainings that differ in one thing, and how far their weights move apart."""
