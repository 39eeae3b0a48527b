"""The mode of calls, the plan of a call in it, and activation checkpoints."""
