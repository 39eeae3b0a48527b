"""From sources to a wheel in dist/: toolchain, number of jobs, the build, its manifest."""
