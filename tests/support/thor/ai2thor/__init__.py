"""A stand-in for the package ai2thor, which plays without a program of Unity."""
