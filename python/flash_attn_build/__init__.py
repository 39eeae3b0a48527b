"""Tools that build, check and describe the wheel; they never go into it."""
