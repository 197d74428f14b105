"""Processes are killed and stopped under load, and every text must come out as ever."""
