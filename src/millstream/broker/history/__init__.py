"""What the broker remembers of its own numbers, for plots: the finer, the shorter."""
