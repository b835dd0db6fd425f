"""Simulators outside JAX that play the games of environments in JAX: AI2-THOR and ManiSkill."""
