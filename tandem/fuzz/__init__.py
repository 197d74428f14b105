"""Extreme requests, from the wire formats down to the workers' samples."""
