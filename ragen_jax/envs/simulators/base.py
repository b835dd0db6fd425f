"""What simulators have in common: they play the game of an environment in JAX, with its texts, actions and rewards.

The simulator executes actions in worker processes, and tells its state as JSON, with pictures. Everything that the
policy reads or earns is made of this state by the environment in JAX, so that one field of the config, `type`, chooses
between the two.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.base import Budget, Environment
from ragen_jax.envs.options import check_integer, check_processes, check_seconds, check_text
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.envs.outside.images import ImageForm
from ragen_jax.envs.outside.processes import GameProcesses, game_processes
from ragen_jax.envs.scenes import Scene, Vocabulary
from ragen_jax.utils.threads import Fault, attempt


@dataclasses.dataclass(frozen=True)
class Told:
  """The outcome of an action, from the state that a simulator told.

  Attributes:
    play: the episode after it, for the environment's own methods.
    reward, done, success, effective: see `outside.base.read_step`.
  """

  play: Any
  reward: float = 0.0
  done: bool = False
  success: bool = False
  effective: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatorEnvironment(TextEnvironment):
  """A simulator. docs/simulators.md describes the options for users.

  The other options are those of `simulator` of the tag `Navigation` in configs/environments.py.

  Attributes:
    world: the environment in JAX whose game it plays.
    observation: 'image', or where the game can be told in words, 'text'.
  """

  any_thread: ClassVar[bool] = True
  observations: ClassVar[tuple[str, ...]] = ('image',)

  world: Environment
  observation: str = 'image'
  size: int = 252
  python: str = ''
  processes: int = 2
  memory_mib: int = 0
  step_timeout_s: float = 300.0

  def __post_init__(self):
    if self.observation not in self.observations:
      allowed = f'{", ".join(self.observations)}, with type={self.name!r}'
      raise ValueError(f'{self.name}: observation={self.observation!r}; allowed: {allowed}')
    check_integer(self.name, 'simulator.size', self.size, 32, 1024)
    check_text(self.name, 'simulator.python', self.python)
    if self.python and shutil.which(self.python) is None:
      raise ValueError(f"{self.name}: simulator.python={self.python!r}; allowed: a program, or '' for {sys.executable}")
    if self.processes == 0 and not isinstance(self.processes, bool):
      raise ValueError(f'{self.name}: simulator.processes=0; allowed: from 1')
    check_processes(self.name, self.processes, self.memory_mib, 1)
    check_seconds(self.name, 'simulator.step_timeout_s', self.step_timeout_s)

  # -- texts, from the environment in JAX ------------------------------------------------------------------------------

  @property
  def image_form(self) -> ImageForm | None:
    return ImageForm(1, self.size, self.size) if self.observation == 'image' else None

  @property
  def action_names(self) -> tuple[str, ...]:
    return self.world.action_names

  @property
  def action_help(self) -> str:
    return self.world.action_help

  @property
  def shown_as(self) -> str:
    return self.world.shown_as

  @property
  def scene_words(self) -> Vocabulary:
    return self.world.scene_words

  @property
  def scene_kinds(self) -> tuple[str, ...]:
    return self.scene_words.kinds

  def rules(self) -> str:
    return self.world.rules()

  def example_actions(self, observation: str) -> tuple[str, ...]:
    return self.world.example_actions(observation)

  def parse_action(self, text: str) -> str | None:
    action = self.world.parse_action(text)
    return None if action is None else self.world.format_action(action)

  def check_budget(self, budget: Budget) -> None:
    self.world.check_budget(budget)

  # -- the game --------------------------------------------------------------------------------------------------------

  @property
  @abc.abstractmethod
  def settings(self) -> dict[str, Any]:
    """Arguments of the games in the worker processes."""

  @abc.abstractmethod
  def level(self, seed: int) -> Any:
    """The level of a seed."""

  @abc.abstractmethod
  def start_of(self, level: Any) -> Any:
    """The plain value from which a worker process begins an episode of a level."""

  @abc.abstractmethod
  def order_of(self, action: str) -> Any:
    """The plain value by which a worker process executes an action."""

  @abc.abstractmethod
  def begin(self, level: Any, state: Mapping[str, Any]) -> Any:
    """The episode that begins with a state of the simulator."""

  @abc.abstractmethod
  def go_on(self, play: Any, state: Mapping[str, Any]) -> Told:
    """The outcome of an action that led an episode to a state of the simulator."""

  @abc.abstractmethod
  def text_of(self, play: Any) -> str:
    """The text of an observation, with a mark for a picture."""

  @abc.abstractmethod
  def scene_of(self, play: Any) -> Scene:
    """What replies may describe."""

  def plan_of(self, play: Any) -> tuple[list[str], str]:
    """The next actions of the expert and the thought behind them; only with `has_expert`."""
    raise NotImplementedError(f'{self.name} has no expert')

  def legal_of(self, play: Any) -> list[str]:
    """The actions that random play chooses from; only without `action_names`."""
    raise NotImplementedError(f'{self.name} has names of actions')

  @functools.cached_property
  def _processes(self) -> GameProcesses:
    limits = {'memory_mib': self.memory_mib, 'step_timeout_s': self.step_timeout_s, 'python': self.python}
    return game_processes(self.name, self.settings, count=self.processes, **limits)

  def check(self) -> None:
    """Starts the simulator in a process; raises ValueError, with one line, if it does not work."""
    where = f'simulator.python={self.python!r}' if self.python else f'type={self.name!r}'
    self._processes.describe(f'{self.name}: {where}')

  def open(self, rows: int) -> SimulatorSession:
    return SimulatorSession(self, functools.partial(self._processes.open, rows))


class SimulatorSession(Session):
  """The rows of a rollout that play a simulator.

  Attributes:
    plays: row -> its episode, see `SimulatorEnvironment.begin`.
  """

  def __init__(self, env: SimulatorEnvironment, connect: Any):
    """`connect` opens a session of the worker processes."""
    self._env, self._connect = env, connect
    self._inner: Session = connect()
    self.plays: dict[int, Any] = {}

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    levels = {seed: self._env.level(seed) for seed in dict.fromkeys(seeds)}
    starts = [self._env.start_of(levels[seed]) for seed in seeds]
    results = []
    for row, seed, raw in zip(rows, seeds, self._inner.reset(rows, starts, members), strict=True):
      began, fault = attempt(functools.partial(self._begin, row, levels[seed], raw), 'reading a state')
      results.append(fault or began)
    return results

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    orders = [self._env.order_of(action) for action in actions]
    results = []
    for row, raw in zip(rows, self._inner.step(rows, orders), strict=True):
      stepped, fault = attempt(functools.partial(self._go_on, row, raw), 'reading a state')
      results.append(fault or stepped)
    return results

  def _begin(self, row: int, level: Any, raw: Any) -> Any:
    if isinstance(raw, Fault):
      return raw
    self.plays[row] = self._env.begin(level, json.loads(_text(raw)))
    return self._shown(row, raw)

  def _go_on(self, row: int, raw: Any) -> Any:
    if isinstance(raw, Fault):
      return raw
    told = self._env.go_on(self.plays[row], json.loads(_text(raw[0])))
    self.plays[row] = told.play
    info = {'success': told.success, 'effective': told.effective}
    return self._shown(row, raw[0]), told.reward, told.done, info

  def _shown(self, row: int, raw: Any) -> Any:
    text = self._env.text_of(self.plays[row])
    return text if self._env.image_form is None else {'text': text, 'images': raw['images']}

  def scenes(self, rows: Sequence[int]) -> list[Scene]:
    return [self._env.scene_of(self.plays[row]) for row in rows]

  def expert(self, rows: Sequence[int]) -> list[Any]:
    return [self._env.plan_of(self.plays[row])[0] for row in rows]

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    return [self._env.plan_of(self.plays[row])[1] for row in rows]

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    return [self._env.legal_of(self.plays[row]) for row in rows]

  def end(self) -> None:
    """Lets other rollouts use the simulators of this one."""
    self._inner = self._connect()


def _text(raw: Any) -> str:
  """The text of an observation of a worker process."""
  return raw if isinstance(raw, str) else raw['text']
