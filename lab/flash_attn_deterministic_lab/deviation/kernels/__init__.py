"""The study of real kernels: their deviation, the presets against them, repeats, and time."""
