"""A fleet in virtual time: no processes, no model, no tokens, but the same verbs, decisions and ledger."""

from flexfloor.fleets.simulation.fleet import SimulatedFleet

__all__ = ["SimulatedFleet"]
