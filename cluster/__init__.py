"""Where things run: topology and placement, the benchmark, and the bundled model pair."""
