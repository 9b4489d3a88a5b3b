"""Models of the world that policy plans with: placement of experts, memory. Pure, without torch."""

from flexfloor.world import jit as _jit  # noqa: F401 - sets numba up before any module imports it
