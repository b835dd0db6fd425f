"""An environment under the name that it has in the config, with its budget and its share of a batch."""

from __future__ import annotations

import dataclasses

from ragen_jax.envs import Budget, Environment, TextEnvironment


@dataclasses.dataclass(frozen=True)
class EnvSpec:
  """The prompt groups of a batch that play one environment.

  Attributes:
    tag: the environment's name in the config.
    max_words: the reply length that the prompt requests, in words.
    tile: pixels of a side of a tile if the board is shown as an image, 0 for what suits the model; None for a board of
      text, and for environments outside JAX.
  """

  tag: str
  env: Environment | TextEnvironment
  budget: Budget
  max_words: int
  num_groups: int
  tile: int | None = None

  @property
  def actions_a_turn(self) -> int:
    """Maximum number of actions in one reply."""
    return 1 if self.env.whole_answer else self.budget.max_actions_per_turn
