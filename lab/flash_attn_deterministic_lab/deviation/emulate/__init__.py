"""Attention with a number format for each step, forward and backward."""
