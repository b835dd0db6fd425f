"""Rollouts: what is queued, runs and has ended, in SQLite."""
