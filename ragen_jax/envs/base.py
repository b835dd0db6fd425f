"""The environment interface: pure functions under jit and vmap, text and pictures on the host.

An environment is a frozen description of a game (its size, probabilities, symbols). It holds no state of play: that
lives in a `State`, a struct of arrays that `jax.vmap` batches. Three kinds of method:

- traced, for one instance: `reset(key) -> state` and `step(state, action, key) -> (state, StepOutput)`;
- host, for a batch of states whose leaves are NumPy arrays with a leading axis [N]: `render`, `render_rgb`, `solve`;
- text about the game, made from its real configuration: `rules`, `legend`, `action_names`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class State:
  """What every environment's state has; environments add their own arrays.

  Attributes:
    done: bool[], the episode has ended by the rules of the game (budgets are the agent's business).
    success: bool[], it ended, and the way it should.
  """

  done: jax.Array
  success: jax.Array


@struct.dataclass
class StepOutput:
  """What one action brought.

  Attributes:
    reward: f32[], the environment's own reward.
    effective: bool[], the action changed the state (a walk into a wall does not).
  """

  reward: jax.Array
  effective: jax.Array


@dataclasses.dataclass(frozen=True)
class Budget:
  """How much an agent may do in one episode: the limits that a solver has to count with."""

  max_turns: int = 5
  max_actions: int = 10
  max_actions_per_turn: int = 5


class Solution(Protocol):
  """The best play on a batch of N levels.

  Attributes:
    success: f32[N], the highest probability of success that any policy reaches within the budget. A turn's actions
      are chosen before the first of them is seen to have acted.
  """

  success: np.ndarray

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[Any]]:
    """The best next turn for each level, from where its episode now stands; that may be the middle of one.

    Args:
      states: batched states [N], in the order of the levels that were solved.
      turns_left: i32[N], turns still to play, this one included.
      actions_left: i32[N], actions still allowed.

    Returns:
      One list of actions a level, at most `max_actions_per_turn` long, empty where the episode is over.

    Raises:
      ValueError: more turns or actions are left than the budget that was solved for has.
    """

  def value(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """What the best play still brings: f32[N], the expected sum of rewards to come.

    The best play is that of the highest probability of success; where success is out of reach, it does as little as the
    game lets it. Arguments and errors are those of `plan`.
    """


class Environment(abc.ABC):
  """A game in pure JAX. Subclasses are frozen dataclasses whose fields are the game's options.

  Class attributes:
    name: the prefix of the environment's metrics, in snake case.
    action_names: what the policy may write, in the order of the action ids 0..; empty when actions are free text.
    action_help: for free-text actions, one line that says how an action is written; else empty.
    has_solver: `solve` is there; without it nobody knows the best play, and the environment has no demonstrations.
  """

  name: ClassVar[str]
  action_names: ClassVar[tuple[str, ...]] = ()
  action_help: ClassVar[str] = ''
  has_solver: ClassVar[bool] = True

  # -- traced, one instance ------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def reset(self, key: jax.Array) -> State:
    """A fresh level from a key; the same key gives the same level on every machine."""

  @abc.abstractmethod
  def _step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, StepOutput]:
    """One action in a live state. `step` takes care of finished ones."""

  def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, StepOutput]:
    """One action; a finished state absorbs it: nothing changes, the reward is 0.

    Args:
      state: the state before.
      action: i32 of shape `action_shape`, as `parse_action` gives it.
      key: a PRNG key for this action's chance.

    Returns:
      The state after, and the `StepOutput`.
    """
    after, out = self._step(state, action, key)
    after = jax.tree.map(lambda new, old: jnp.where(state.done, old, new), after, state)
    reward = jnp.where(state.done, 0.0, out.reward).astype(jnp.float32)
    return after, StepOutput(reward=reward, effective=out.effective & ~state.done)

  # -- text ----------------------------------------------------------------------------------------------------------

  @property
  def action_shape(self) -> tuple[int, ...]:
    """Shape of one parsed action; () unless actions are free text."""
    return ()

  @abc.abstractmethod
  def rules(self) -> str:
    """What the game is and what is to be reached, in one or a few lines."""

  def legend(self) -> dict[str, str]:
    """Symbol to meaning, for boards made of symbols; empty otherwise."""
    return {}

  def parse_action(self, text: str) -> Any | None:
    """The action that a piece of the answer names, or None when it names none. Letter case and blanks do not matter."""
    wanted = text.strip().lower()
    for i, name in enumerate(self.action_names):
      if name.lower() == wanted:
        return i
    return None

  @property
  def action_words(self) -> tuple[str, ...]:
    """Every word that is an action on some level; empty where actions are free text."""
    return self.action_names

  def format_action(self, action: Any) -> str:
    """How an action is written in an answer: the inverse of `parse_action`."""
    return self.action_names[int(action)]

  # -- host, batched ---------------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def render(self, states: Any) -> list[str]:
    """The observation as text, for a batch of states with NumPy leaves [N, ...]."""

  @abc.abstractmethod
  def render_rgb(self, state: Any) -> np.ndarray:
    """One state (no batch axis) as a picture, u8[height, width, 3]."""

  def from_text(self, text: str) -> Any:
    """One state (no batch axis) from the text that `render` draws.

    Raises:
      ValueError: the text is no level of this environment; the message says where.
    """
    raise ValueError(f'{self.name}: levels cannot be read from text')

  def solve(self, states: Any, budget: Budget, discount: float = 1.0) -> Solution:
    """The exact best play on a batch of fresh levels, within a budget.

    Args:
      states: batched states with NumPy leaves [N, ...].
      budget: turns and actions that an episode may take.
      discount: what a success is worth after each further action; below 1 the plans do not dawdle. The reported
        `success` is always the undiscounted optimum.

    Raises:
      ValueError: there is no exact solver for the game, or not for a game of this size.
    """
    raise ValueError(f'{self.name} has no solver')

  def legal_actions(self, states: Any) -> list[list[Any]]:
    """For each state the actions that can be meant: what a player without a plan chooses from."""
    return [list(range(len(self.action_names)))] * len(np.asarray(states.done))

  def as_a_beginner_sees_it(self) -> Environment:
    """The game without what only experience teaches, for demonstrations of weak play; by default itself."""
    return self

  def check_budget(self, budget: Budget) -> None:
    """Raises ValueError where the budget can solve no level; by default none is refused."""
    del budget

  def optimal(self, states: Any, budget: Budget) -> np.ndarray:
    """f32[N], the highest success probability that any policy reaches on these levels within the budget.

    NaN where nobody knows.
    """
    if not self.has_solver:
      return np.full((len(np.asarray(states.done)),), np.nan, np.float32)
    return self.solve(states, budget).success

  def rationale(self, states: Any) -> list[str]:
    """For each state one short true sentence that a player would think: the think text of demonstrations."""
    return ['' for _ in range(len(np.asarray(states.done)))]
