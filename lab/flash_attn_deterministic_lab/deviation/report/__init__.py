"""Claims, verdicts, plots, and the pages that show them."""
