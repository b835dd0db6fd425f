"""The environment type 'lean': proofs that a Lean server checks."""
