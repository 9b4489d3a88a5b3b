"""Policy: which request goes where, and who leaves when. Knows the fleet by its status only; never imports torch."""

from flexfloor.policy.base import Policy
from flexfloor.policy.names import POLICIES, make_policy

__all__ = ["POLICIES", "Policy", "make_policy"]
