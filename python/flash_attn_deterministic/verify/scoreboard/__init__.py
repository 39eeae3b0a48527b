"""Which rows of the contract other attention keeps: what `verify --attention` runs."""
