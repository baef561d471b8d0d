"""Search for the temperature τ over many runs, in the ways that the paper compares."""
