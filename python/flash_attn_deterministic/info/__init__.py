"""What this wheel holds, and whether this machine can run it."""
