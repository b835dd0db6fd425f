"""The interface of the rows of one environment in a batch."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ragen_jax.agent.image_observations import check_images
from ragen_jax.agent.segments import Observation
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils.threads import Fault

FAULT_MESSAGE = 'envs.%s, level %d: %s; the episode ends as an error. Further ones are only counted, in %s/env_errors'


class PoolStep(NamedTuple):
  """The outcome of a turn's actions for the rows of a pool; the fields are those of `env_manager.StepResult`."""

  rewards: list[tuple[float, ...]]
  executed: np.ndarray
  effective: np.ndarray
  metrics: list[dict[str, float]]


# The outcomes of a row's actions of a turn outside JAX: a `TextStep` each; a `Fault` is the last one.
Outcomes = list[Any]


class Pool(abc.ABC):
  """The rows of one environment, numbered from 0; group g has the rows g*G .. g*G+G-1.

  Attributes:
    processor: of the model that reads images; None if observations are text.
    outside: whether the environment is outside JAX. Its reset may have side effects, so it is called only to begin an
      episode: first prompts are not checked in advance.
    faults: row -> the fault that ended its episode since `reset`.
    used: i32[rows], number of executed actions since `reset`.
  """

  outside: bool

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    self.spec = spec
    self.rows = rows
    self.group_size = group_size
    self.processor = processor
    if processor is not None:
      check_images(spec, processor)
    self.faults: dict[int, Fault] = {}
    self.used = np.zeros((rows,), np.int32)

  @property
  @abc.abstractmethod
  def done(self) -> np.ndarray:
    """bool[rows], whether the game is over; also True if the environment failed."""

  @property
  @abc.abstractmethod
  def success(self) -> np.ndarray:
    """bool[rows], whether the game is over and won."""

  @abc.abstractmethod
  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    """Starts fresh episodes, from i64[rows] seeds of the levels and i64[rows] numbers of the rows in their groups."""

  @abc.abstractmethod
  def step(self, actions: list[list[Any]]) -> PoolStep:
    """Executes each row's actions of a turn."""

  def play(self, actions: Mapping[int, list[Any]]) -> dict[int, Outcomes]:
    """Executes the actions of a turn in some rows, without a change of this pool, and gives their outcomes for `take`.

    Only for environments outside JAX. With `any_thread` several threads may call it, for different rows.
    """
    del actions
    raise NotImplementedError(f'{self.spec.env.name} plays in JAX')

  def take(self, outcomes: Mapping[int, Outcomes]) -> PoolStep:
    """The step whose outcomes `play` gave; rows without outcomes have played nothing."""
    del outcomes
    raise NotImplementedError(f'{self.spec.env.name} plays in JAX')

  def fail(self, row: int, fault: Fault) -> None:
    """Ends the episode of a row as an error, and warns once of each kind. Only for environments outside JAX."""
    del row, fault
    raise NotImplementedError(f'{self.spec.env.name} plays in JAX')

  @abc.abstractmethod
  def render(self) -> list[Observation]:
    """The current observations."""

  def picture(self, row: int) -> np.ndarray | None:
    """u8[H, W, 3], the current board of a row; None if the environment draws no pictures."""
    del row
    return None

  def scenes(self, rows: list[int]) -> list[Scene]:
    """The current scenes of some rows; only for environments with `scene_kinds`."""
    del rows
    raise NotImplementedError(f'{self.spec.env.name} has no scenes')

  @abc.abstractmethod
  def levels(self) -> list[bytes | None]:
    """The initial level of each group, equal for equal boards or items of any seed or tag; None if unknown."""

  def find_levels(self, seeds: np.ndarray, members: np.ndarray) -> list[bytes | None]:
    """The `levels` that `reset` would begin with. An environment in JAX is reset to them, one outside JAX is not."""
    self.reset(seeds, members)
    return self.levels()

  def expert(self, rows: list[int]) -> list[list[str]]:
    """The names of the reference actions for the next turn of some rows, at most as many as the turn may play.

    None where the expert has none or fails, which is logged once for each kind of fault. Only for environments with
    `has_expert`.
    """
    del rows
    raise NotImplementedError(f'{self.spec.env.name} has no expert')

  @abc.abstractmethod
  def legal_actions(self) -> list[list[str]]:
    """For each row, the names of the legal actions; only for environments with `has_legal_actions`."""

  def optimal(self) -> np.ndarray:
    """f32[rows], the best success probability on the levels of the last `reset`; NaN if unknown.

    Raises ValueError if the solver does not support this size of the game or this budget.
    """
    return np.full((self.rows,), np.nan, np.float32)

  def abandon(self) -> None:
    """Gives up a rollout whose turns may still play in threads. The default plays in none."""
    return

  def end(self) -> None:
    """Ends the rollout: environments outside JAX may release their episodes. `reset` must precede the next `step`."""
    return
