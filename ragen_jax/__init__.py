"""RAGEN in JAX: multi-turn reinforcement learning of language-model agents (StarPO).

The letters of array shapes, everywhere in this package:

  B  trajectories, P prompt groups times G members      T  columns of the token timeline
  S  columns of the key/value cache                     L  layers
  D  model width                                        F  width of the MLP
  N  query heads                                        K  key/value heads
  H  width of a head                                    V  vocabulary
  A  actions a turn
"""
