"""What all results are shown by: one model of a document, its templates, and one drawer."""
