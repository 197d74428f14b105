"""Where things run: the options, topology, placement, planning, and the bundled model pair."""
