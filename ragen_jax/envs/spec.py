"""An environment under the name that it has in the config, with its budget and its share of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from ragen_jax.envs import Budget, Environment, TextEnvironment

# Fields of an environment in the config that may be missing -> the values with which those of the run hold.
OPTIONAL: dict[str, Any] = {'max_response_tokens': 0, 'max_observation_tokens': 0, 'request': ''}


@dataclasses.dataclass(frozen=True)
class EnvSpec:
  """The prompt groups of a batch that play one environment.

  Attributes:
    tag: the environment's name in the config.
    max_words: the reply length that the prompt requests, in words.
    tile: pixels of a side of a tile if the board is shown as an image, 0 for what suits the model; None for a board of
      text, and for environments outside JAX.
    max_response_tokens: maximum tokens of one reply; 0 for the run's.
    max_observation_tokens: maximum tokens of an observation's text, which is cut; 0 for no cut.
    request: the request for a reply; '' for the run's.
  """

  tag: str
  env: Environment | TextEnvironment
  budget: Budget
  max_words: int
  num_groups: int
  tile: int | None = None
  max_response_tokens: int = 0
  max_observation_tokens: int = 0
  request: str = ''

  @property
  def actions_a_turn(self) -> int:
    """Maximum number of actions in one reply."""
    return 1 if self.env.whole_answer else self.budget.max_actions_per_turn
