"""The commands: thin shells on the Python API."""

from flexfloor.cli.app import main

__all__ = ["main"]
