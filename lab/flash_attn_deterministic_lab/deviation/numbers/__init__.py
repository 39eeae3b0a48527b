"""Number formats, distances between tensors, and intervals of what was measured."""
