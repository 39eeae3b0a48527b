"""Time and memory on a GPU, ours beside the standard in one process."""
