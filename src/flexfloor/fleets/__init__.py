"""Fleets: implementations of the fleet protocol."""
