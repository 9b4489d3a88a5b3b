"""Simulated experiments: scenarios, runs of policies on them, and how these compare. Nothing here uses a device."""
