"""Extreme but legal requests, from the HTTP schema down to the workers' samples."""
