"""Models of the world that policy plans with: placement of experts, memory. Pure, without torch."""
