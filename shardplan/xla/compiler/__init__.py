"""Compiles steps for devices present or absent, in a child process."""
