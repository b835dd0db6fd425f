"""Exact solvers of the games: each implements `Solution` of envs/base.py from sizes, probabilities and arrays."""
