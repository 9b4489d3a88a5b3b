"""The ledger: an append-only record of a rollout, and the accounting made from it and from nothing else."""
