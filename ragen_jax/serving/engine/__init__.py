"""Engine: continuous batching, ids and a key to sampled ids with their numbers."""
