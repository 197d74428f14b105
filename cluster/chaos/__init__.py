"""Processes are killed under load, and every text must come out as if nothing had happened."""
