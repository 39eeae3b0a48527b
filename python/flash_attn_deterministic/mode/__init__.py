"""The mode of calls, and what it makes of one: plan, explain, activation checkpoints."""
