"""Seconds and bytes of every choice, as one cost network."""
