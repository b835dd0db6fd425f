"""Questions with known answers as an environment: sources of items, verifiers of answers, episodes."""
