"""Play: programs play tasks, and what they did becomes a `Rollout`."""
