"""Text adventures of the package TextWorld as an environment: game files, and their play in worker processes."""
