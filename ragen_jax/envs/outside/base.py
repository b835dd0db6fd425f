"""The interface of environments outside JAX, which exchange text and images on the host. Failures do not end a run.

A `TextEnvironment` has the same interface for prompts and replies as an `Environment`. It opens `Session`s, which play
it on many rows at once. If a game raises, hangs or returns nonsense, the agent ends the episode as an error and
continues. `read_observation` and `read_step` check everything that a session returns, and never raise.

The time limits are those of the session, and the agent has none when it reads the results. A session that plays foreign
objects therefore reads them within its limits, and returns plain values, which the agent reads again.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import logging
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from ragen_jax.envs.base import OF, Game
from ragen_jax.envs.outside.images import ImageForm, ImageObservation, read_image_observation, read_text
from ragen_jax.envs.scenes import Scene
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.threads import Fault, attempt

_log = logging.getLogger(__name__)

FREE_TEXT = 'An action is free text.'
LARGEST_REWARD = 1e15  # its square is still far below the largest float32
_MOST_METRICS = 64
METRIC_NAME = re.compile(r'[a-z][a-z0-9_]{0,63}')
_LONGEST_FAULT = 300  # characters of each text of a fault; a message shows no more


class Session(abc.ABC):
  """The rows of a rollout that play one environment, numbered from 0. Each row plays one episode after another."""

  @abc.abstractmethod
  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """Starts new episodes. Rows with equal seeds must begin with equal observations.

    `members` are the numbers of the rows in their groups, to seed randomness that the members do not share.

    Returns:
      The first observation of each row, an input of `read_observation`: text, or with images a mapping; or a `Fault`.
    """

  @abc.abstractmethod
  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """Executes one action in each of the given rows. With `any_thread` several threads may call it, for different rows.

    Returns for each row an input of `read_step`: (observation, reward, done, info), or a `Fault`.
    """

  def expert(self, rows: Sequence[int]) -> list[Any]:
    """Reference actions for the next turn of each row, from its present state, which does not change.

    Only for environments with `has_expert`.

    Returns:
      For each row an input of `read_expert`: the texts of actions, of which the turn plays as many as it may; none if
      there is no advice; or a `Fault`.
    """
    del rows
    raise NotImplementedError('there is no expert')

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    """For each row the thought behind the reference actions, a text, for demonstrations. The default is empty."""
    return [''] * len(rows)

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    """The actions that random play chooses from, in the present state of each row, which does not change.

    Only for environments with `has_legal_actions` that have no `action_words`.

    Returns:
      For each row an input of `read_expert`: the texts of actions; or a `Fault`.
    """
    del rows
    raise NotImplementedError('legal actions are not known')

  def scenes(self, rows: Sequence[int]) -> list[Scene]:
    """What replies may describe of the present state of each row. Only for environments with `scene_kinds`."""
    del rows
    raise NotImplementedError('there are no scenes')

  def end(self) -> None:
    """Called when a rollout is over: no row is stepped before its next reset. The default does nothing."""
    return


class TextEnvironment(Game):
  """A game outside JAX, whose actions are strings.

  Subclasses are frozen dataclasses whose fields are the options of the game, compared by identity. The states of their
  levels are not visible: there is no solver, and no level can be read from text.
  """

  has_solver: ClassVar[bool] = False
  is_outside: ClassVar[bool] = True
  image_form: ClassVar[ImageForm | None] = (
    None  # number and size of the images in each observation; None for text alone
  )

  @abc.abstractmethod
  def open(self, rows: int) -> Session:
    """Opens a session with `rows` rows. Only one thread at a time uses it, apart from `Session.step`."""

  def level_id(self, seed: int) -> str | None:
    """Which item the level of a seed is, equal for equal items of any environment; None if unknown.

    Training plays no items of the evaluation (`EnvStateManager`). The method has no effect but its result: no episode
    begins.
    """
    del seed
    return None

  def parse_action(self, text: str) -> str | None:
    """The name of the action, or None. Without `action_names` every non-blank text is an action.

    A whole answer keeps the white space at its ends, such as the indentation of its first line.
    """
    word = text.strip()
    if not self.action_names:
      return (text if self.whole_answer else word) if word else None
    return next((name for name in self.action_names if name.lower() == word.lower()), None)

  def format_action(self, action: str) -> str:
    return action

  @final
  def read_action(self, text: str) -> tuple[str, str] | None:
    """Like `Game.read_action`, but never raises. A text that cannot be parsed is not an action, and is logged once."""

    def read() -> tuple[str, str] | None:
      action = self.parse_action(text)
      if action is None:
        return None
      written = self.format_action(action)
      if not isinstance(action, str) or not isinstance(written, str):
        raise TypeError(f'{one_line(action)}, written {one_line(written)}, is not a string')
      return action, written

    result, fault = attempt(read, 'parse_action or format_action')
    logged = vars(self).setdefault('_logged_kinds', set())
    if fault is not None and fault.kind not in logged:
      logged.add(fault.kind)
      _log.warning('%s: %s; such text is not an action', self.name, fault)
    return result

  @property
  def has_legal_actions(self) -> bool:
    """Whether legal actions can be listed: actions are words, or else its sessions have `legal_actions`."""
    return bool(self.action_words)

  def legal_actions(self, states: Any) -> list[list[str]]:
    return [list(self.action_words)] * len(np.asarray(states.done))


def floored(score: float) -> str:
  """A score with two decimals, for an observation; it does not reach 1 unless the score does."""
  return f'{math.floor(score * 100 + 1e-9) / 100:.2f}'


# -- checking the results of an environment ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TextStep:
  """The checked outcome of one action.

  Attributes:
    effective: whether the action changed anything; None if the environment does not say.
    metrics: the environment's own measurements of this action, by name; a ratio has two, see `envs.base.OF`.
  """

  observation: str | ImageObservation
  reward: float
  done: bool
  success: bool
  effective: bool | None = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def reported(self) -> dict[str, float | tuple[float, float]]:
    """The metrics as `read_step` reads them."""
    numbers_of = {name: x for name, x in self.metrics.items() if not name.endswith(OF)}
    return {name: (x, self.metrics[name + OF]) if name + OF in self.metrics else x for name, x in numbers_of.items()}


def read_observation(raw: Any, form: ImageForm | None = None) -> str | ImageObservation | Fault:
  """A checked observation, see `read_text` and `read_image_observation`.

  `raw` is a `Fault`, a text, or with images {'text': str, 'images': [u8[height, width, 3], ...]}.
  """
  observation, fault = attempt(functools.partial(_read_observation, raw, form), 'reading an observation')
  return fault or observation


def _read_observation(raw: Any, form: ImageForm | None) -> str | ImageObservation | Fault:
  if isinstance(raw, Fault):
    return _read_fault(raw)
  read = read_text(raw) if form is None else read_image_observation(raw, form)
  return _read_fault(read) if isinstance(read, Fault) else read


def _read_fault(raw: Fault) -> Fault:
  """The fault with texts of its own, because foreign code may have made it from any object."""
  kind, detail = (one_line(text, str)[:_LONGEST_FAULT] for text in (raw.kind, raw.detail))
  return Fault(kind, detail, bool(raw.hung))


def read_reward(raw: Any, what: str = 'reward') -> float | Fault:
  """A checked reward, from any number; `what` names it in a fault."""
  try:
    number = float(raw)
  except OverflowError:  # an integer of hundreds of digits
    number = math.inf
  if not abs(number) <= LARGEST_REWARD:  # also for NaN
    return Fault(f'{what} is not within {LARGEST_REWARD:g}', short(raw))
  return number


def _read_metrics(raw: Any) -> dict[str, float] | Fault:
  """Checked measurements, from a mapping of names in snake case to numbers, or to a numerator and a denominator.

  The denominator has the name of the ratio with the ending `OF`.
  """
  if not isinstance(raw, Mapping):
    return Fault('metrics are not a mapping', short(raw))
  found: dict[str, float] = {}
  for name, value in raw.items():
    if len(found) >= _MOST_METRICS:
      return Fault(f'step reports more than {_MOST_METRICS} metrics')
    if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
      return Fault('the name of a metric is not in snake case, of at most 64 characters', short(name))
    name = str.__str__(name)
    parts = value if isinstance(value, tuple | list) and len(value) == 2 else (value,)
    for key, part in zip((name, name + OF), parts, strict=False):
      if not isinstance(part, numbers.Real | np.bool_):
        return Fault(f'metric {name} is not a number', short(value))
      number = read_reward(part, f'metric {name}')
      if isinstance(number, Fault):
        return number
      found[key] = number
  return found


def read_expert(raw: Any, what: str = 'expert') -> list[str] | Fault:
  """The checked texts of reference or legal actions, from a list or tuple; a text alone is no list.

  `what` names the method that returned it in a fault.
  """
  actions, fault = attempt(functools.partial(_read_expert, raw, what), f'reading the actions of {what}')
  return fault or actions


def _read_expert(raw: Any, what: str) -> list[str] | Fault:
  if isinstance(raw, Fault):
    return _read_fault(raw)
  if not isinstance(raw, tuple | list):
    return Fault(f'{what} did not return a list of texts', short(raw))
  texts = [read_text(action) for action in raw]
  wrong = next((text for text in texts if isinstance(text, Fault)), None)
  return texts if wrong is None else Fault(f'{what} did not return a list of texts', wrong.detail)


def read_step(raw: Any, form: ImageForm | None = None, *, success_stands: bool = False) -> TextStep | Fault:
  """The checked result of a step: a `Fault`, or (observation, reward, done, info).

  `info` is the success as a bool, or a mapping with 'success' (needed once the game is over), perhaps 'effective', and
  perhaps 'metrics': finite numbers, or pairs of them for ratios, by names in snake case. A success before the game is
  over is none, unless `success_stands`.
  """
  step, fault = attempt(functools.partial(_read_step, raw, form, success_stands), 'reading a step')
  return fault or step


def _read_step(raw: Any, form: ImageForm | None, success_stands: bool) -> TextStep | Fault:
  if isinstance(raw, Fault):
    return _read_fault(raw)
  if inspect.isawaitable(raw):
    if inspect.iscoroutine(raw):
      raw.close()
    return Fault('step is async', 'define it with def, and call asyncio.run in it')
  if not isinstance(raw, tuple | list) or len(raw) != 4:
    return Fault('step did not return (observation, reward, done, success)', short(raw))
  observation, reward, done, info = raw
  observation = read_observation(observation, form)
  if isinstance(observation, Fault):
    return observation
  if not isinstance(reward, numbers.Real | np.bool_):
    return Fault('reward is not a number', short(reward))
  number = read_reward(reward)
  if isinstance(number, Fault):
    return number
  if not isinstance(done, bool | np.bool_):
    return Fault('done is not a bool', short(done))
  success, effective, metrics = info, None, {}
  if isinstance(info, Mapping):
    success, effective = info.get('success', None if done else False), info.get('effective')
    metrics = {} if info.get('metrics') is None else _read_metrics(info['metrics'])
  if not isinstance(success, bool | np.bool_):
    return Fault('success is not a bool', short(info))
  if not isinstance(effective, bool | np.bool_ | None):
    return Fault('effective is not a bool', short(effective))
  if isinstance(metrics, Fault):
    return metrics
  effective = None if effective is None else bool(effective)
  return TextStep(observation, number, bool(done), bool(success and (done or success_stands)), effective, metrics)
