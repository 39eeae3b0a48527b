"""What all studies share: files, progress, and where they ran."""
