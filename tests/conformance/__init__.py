"""One list of named scenarios, run on every arm: replayed, simulated, and real processes."""
