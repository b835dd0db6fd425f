"""Bandit: one pull of one of two arms; only their names hint at which is safe and which is risky.

The game of RAGEN's single-turn experiments. Training on some pairs of names and evaluation on others shows whether a
policy has learnt the meaning of names or only a word to write. The pairs below are (low arm, high arm).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs.options import is_number
from ragen_jax.envs.solvers.one_action import OneActionSolution

Pairs = tuple[tuple[str, str], ...]

# RAGEN's first version: the training pair and the test pair.
PHOENIX_DRAGON: Pairs = (('Phoenix', 'Dragon'),)
TRADER_LIBRARIAN: Pairs = (('Trader', 'Librarian'),)
# The paper's test of generalisation, from one pair of professions to another. The risky arm has the profession that
# sounds risky; in the reverse (BanditRev), the profession that sounds safe.
PROFESSIONS_TRAIN: Pairs = (('Teacher', 'Engineer'),)
PROFESSIONS_TEST: Pairs = (('Librarian', 'Trader'),)
REVERSED_TRAIN: Pairs = (('Engineer', 'Teacher'),)
REVERSED_TEST: Pairs = (('Trader', 'Librarian'),)
# RAGEN-2: twelve training pairs, and eight other pairs for evaluation.
RAGEN2_TRAIN: Pairs = (
  ('Teacher', 'Trader'),
  ('Nurse', 'StartupFounder'),
  ('Librarian', 'Investor'),
  ('Accountant', 'StockBroker'),
  ('Engineer', 'RealEstateAgent'),
  ('Pharmacist', 'Musician'),
  ('Clerk', 'Freelancer'),
  ('Technician', 'Youtuber'),
  ('Planner', 'Artist'),
  ('Postman', 'Pilot'),
  ('Banker', 'VentureCapitalist'),
  ('Gardener', 'Cryptominer'),
)
RAGEN2_TEST: Pairs = (
  ('Receptionist', 'Explorer'),
  ('Archivist', 'Filmmaker'),
  ('Bookkeeper', 'Consultant'),
  ('SocialWorker', 'Photographer'),
  ('Mechanic', 'GameDesigner'),
  ('Secretary', 'Entrepreneur'),
  ('Cashier', 'DataScientist'),
  ('CivilServant', 'StartupAccelerator'),
)

LOW, HIGH = range(2)

_OFFER = 'Arms on offer:'
_QUESTION = 'Think about which name suggests low risk and which high risk, then pull one arm.'

# The picture: two boxes of 32 x 32 pixels, and a frame of 2 pixels around the pulled arm.
_BOX = 32
_FRAME = 2
_BAR = 10
_PULLED_RGB = (255, 255, 255)
_BAR_RGB = (250, 210, 60)


@struct.dataclass
class State(base.State):
  """Two arms, and the outcome of the pull.

  Attributes:
    pair: i32[], index into the environment's `arms`.
    high_first: bool[], whether the observation names the high arm first.
    pulled: i32[], LOW or HIGH; -1 before the pull.
    points: f32[], the reward of the pull; 0 before.
  """

  pair: jax.Array
  high_first: jax.Array
  pulled: jax.Array
  points: jax.Array


@dataclasses.dataclass(frozen=True)
class Bandit(base.Environment):
  """Pull the arm that pays more on average; its name suggests that it is the risky one.

  The low arm always pays `low_reward`; the high arm pays `high_reward` with probability `high_probability`, else 0.
  Success is the choice of the high arm, whatever it pays. A level is a pair of arms and the order of their names; both
  come from the key of `reset`, so the members of a group share their prompt.

  Actions are names: each distinct name of the configured pairs has one id, in order of first appearance (`names`). A
  name that is not an arm of the level is an action without effect or reward, and the game goes on.

  Attributes:
    arms: pairs of names, (low arm, high arm).
    low_reward: reward of the low arm.
    high_reward: reward of the high arm if it pays, above 0.
    high_probability: probability that the high arm pays; high_probability * high_reward is above low_reward.
  """

  name: ClassVar[str] = 'bandit'
  action_help: ClassVar[str] = 'An action is the name of one of the two arms on offer.'

  arms: Pairs = PHOENIX_DRAGON
  low_reward: float = 0.1
  high_reward: float = 1.0
  high_probability: float = 0.25

  def __post_init__(self):
    # Configs contain lists; tuples keep the environment hashable.
    object.__setattr__(self, 'arms', _checked_arms(self.arms))
    for field in ('low_reward', 'high_reward', 'high_probability'):
      value = getattr(self, field)
      if not is_number(value) or not math.isfinite(value):
        raise ValueError(f'bandit: {field}={value!r}; allowed: finite numbers')
    if not self.high_reward > 0:
      raise ValueError(f'bandit: high_reward={self.high_reward!r}; allowed: above 0')
    if not 0 < self.high_probability <= 1:
      raise ValueError(f'bandit: high_probability={self.high_probability!r}; allowed: above 0, at most 1')
    mean = self.high_probability * self.high_reward
    if not mean > self.low_reward:
      raise ValueError(
        f'bandit: low_reward={self.low_reward!r}; allowed: below high_probability * high_reward, here {mean:g}'
      )

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """The distinct names of all arms, in the order of their action ids."""
    return tuple(dict.fromkeys(name for pair in self.arms for name in pair))

  @functools.cached_property
  def _ids(self) -> np.ndarray:
    """i32[pairs, 2], the action ids of the low and the high arm of each pair."""
    return np.array([[self.names.index(name) for name in pair] for pair in self.arms], np.int32)

  def reset(self, key: jax.Array) -> State:
    """A pair and the order of its names, both uniform."""
    key_pair, key_order = jax.random.split(key)
    no = jnp.bool_(False)
    return State(
      done=no,
      success=no,
      pair=jax.random.randint(key_pair, (), 0, len(self.arms), jnp.int32),
      high_first=jax.random.bernoulli(key_order),
      pulled=jnp.int32(-1),
      points=jnp.float32(0),
    )

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    low, high = action == jnp.asarray(self._ids)[state.pair]
    on_offer = low | high
    high_pays = jax.random.bernoulli(key, self.high_probability)
    points = jnp.where(low, self.low_reward, jnp.where(high & high_pays, self.high_reward, 0.0)).astype(jnp.float32)
    pulled = jnp.where(low, LOW, jnp.where(high, HIGH, -1)).astype(jnp.int32)
    state = state.replace(done=on_offer, success=high, pulled=pulled, points=points)
    return state, base.StepOutput(reward=points, effective=on_offer)

  def identities(self, states: State) -> list[bytes]:
    """The names, since the number of a pair stands for other names in other tags."""
    return [text.encode() for text in self.render(states)]

  def rules(self) -> str:
    return (
      'You can pull one of two arms, once. One arm has low risk and the other high risk; their names hint at which is '
      'which. Each arm pays points with its own probabilities. Pull the arm that you expect to pay more on average.'
    )

  def parse_action(self, text: str) -> int | None:
    """The id of a configured arm's name. Blanks within the name are ignored, too."""
    return self._id_by_key.get(_key(text))

  @functools.cached_property
  def _id_by_key(self) -> dict[str, int]:
    return {_key(name): i for i, name in enumerate(self.names)}

  @property
  def action_words(self) -> tuple[str, ...]:
    return self.names

  def example_actions(self, observation: str) -> tuple[str, ...]:
    """The two arms on offer, in the order of the observation."""
    shown = tuple(line for line in observation.splitlines() if line in self.names)
    return shown or self.names

  def example_key(self, observation: str) -> str:
    """The observation with its arms in alphabetical order: a pair in both orders shows each of its arms once."""
    lines = observation.splitlines()
    arms = iter(sorted(line for line in lines if line in self.names))
    return '\n'.join(next(arms) if line in self.names else line for line in lines)

  def format_action(self, action: int) -> str:
    return self.names[int(action)]

  def render(self, states: State) -> list[str]:
    """The two names in the level's order, and the question or the outcome of the pull, for states [N]."""
    leaves = (states.pair, states.high_first, states.pulled, states.points)
    return [self._text(*row) for row in zip(*(np.asarray(leaf).tolist() for leaf in leaves), strict=True)]

  def _text(self, pair: int, high_first: bool, pulled: int, points: float) -> str:
    names = self.arms[pair]
    result = _QUESTION if pulled < 0 else f'{names[pulled]}: {points:.6g} points'
    return f'{_OFFER}\n{names[HIGH if high_first else LOW]}\n{names[LOW if high_first else HIGH]}\n{result}'

  def from_text(self, text: str) -> State:
    lines = [line.strip() for line in text.strip().splitlines()]
    if len(lines) != 4 or lines[0] != _OFFER:
      raise ValueError(
        f'bandit: the text is {text!r}, must be {_OFFER!r}, two arms and the question or the outcome, on 4 lines'
      )
    shown = (lines[1], lines[2])
    high_first = shown[::-1] in self.arms
    if not high_first and shown not in self.arms:
      raise ValueError(f'bandit: lines 2 and 3 are {lines[1]!r} and {lines[2]!r}, must be a pair of {self.arms}')
    pair = self.arms.index(shown[::-1] if high_first else shown)
    for pulled, points in ((-1, 0.0), (LOW, self.low_reward), (HIGH, 0.0), (HIGH, self.high_reward)):
      if lines[3] == self._text(pair, high_first, pulled, points).splitlines()[-1]:
        return State(
          done=np.asarray(pulled >= 0),
          success=np.asarray(pulled == HIGH),
          pair=np.asarray(pair, np.int32),
          high_first=np.asarray(high_first),
          pulled=np.asarray(pulled, np.int32),
          points=np.asarray(points, np.float32),
        )
    raise ValueError(f'bandit: line 4 is {lines[3]!r}, must be the question or what one of the arms can pay')

  def render_rgb(self, state: State) -> np.ndarray:
    """The arms as two boxes in the level's order, u8[32, 64, 3].

    A box has the colour of its name. The pulled arm has a frame, and a bar whose height is its share of `high_reward`.
    """
    picture = np.zeros((_BOX, 2 * _BOX, 3), np.uint8)
    order = (HIGH, LOW) if state.high_first else (LOW, HIGH)
    for i, arm in enumerate(order):
      box = picture[:, i * _BOX : (i + 1) * _BOX]
      pulled = int(state.pulled) == arm
      box[:] = _PULLED_RGB if pulled else 0
      inside = box[_FRAME:-_FRAME, _FRAME:-_FRAME]
      inside[:] = _colour(int(self._ids[int(state.pair), arm]), len(self.names))
      height = round(len(inside) * min(1.0, max(0.0, float(state.points) / self.high_reward))) if pulled else 0
      middle = (inside.shape[1] - _BAR) // 2
      inside[len(inside) - height :, middle : middle + _BAR] = _BAR_RGB
    return picture

  def rationale(self, states: State) -> list[str]:
    """A reason for the high arm."""
    pairs = (self.arms[pair] for pair in np.asarray(states.pair).tolist())
    return [f'{high} sounds riskier than {low} and may pay more.' for low, high in pairs]

  def legal_actions(self, states: State) -> list[list[int]]:
    return self._ids[np.asarray(states.pair)].tolist()

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> OneActionSolution:
    """The pull of the high arm. That choice is a success, and every budget allows it."""
    del budget, discount
    states = jax.tree.map(np.asarray, states)
    return OneActionSolution(
      success=np.where(states.done, states.success, 1).astype(np.float32),
      actions=self._ids[states.pair, HIGH].tolist(),
    )


def _key(name: str) -> str:
  return ''.join(name.split()).lower()


def _is_pair(value: object) -> bool:
  return isinstance(value, list | tuple) and len(value) == 2


def _checked_arms(arms: Pairs) -> Pairs:
  """The pairs as tuples; ValueError if they are malformed, spell a name in two ways, or have a pair in both orders."""
  if not isinstance(arms, list | tuple) or not arms or not all(_is_pair(pair) for pair in arms):
    raise ValueError(f'bandit: arms={arms!r}; allowed: one or more pairs of names, (low arm, high arm)')
  arms = tuple(tuple(pair) for pair in arms)
  written = {}
  for pair in arms:
    for name in pair:
      if not isinstance(name, str) or not re.fullmatch(r"\w([\w '-]*\w)?", name):
        raise ValueError(f'bandit: arms has the name {name!r}; allowed: letters, digits, and blanks or - between them')
      if written.setdefault(_key(name), name) != name:
        raise ValueError(f'bandit: arms has {written[_key(name)]!r} and {name!r}; allowed: one way to write a name')
    if pair[::-1] in arms:
      raise ValueError(f'bandit: arms has the pair {pair!r} and its reverse; allowed: only one of them, of two names')
  return arms


def _colour(index: int, count: int) -> np.ndarray:
  """The colour of name number `index` of `count`, u8[3], from equal steps on the colour circle."""
  phase = 2 * np.pi * (index / count + np.array([0, 1, 2]) / 3)
  return (110 + 80 * np.cos(phase)).astype(np.uint8)
