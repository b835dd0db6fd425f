"""The rows of one environment in a batch, for each kind of environment: in JAX, or outside it.

Only this module distinguishes the two kinds. A pool answers questions about its environment: whether it is outside JAX,
the legal actions, the best possible success.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent.image_observations import tile_of, with_images
from ragen_jax.agent.outside_pool import OutsidePool
from ragen_jax.agent.pool import FAULT_MESSAGE, Pool, PoolStep
from ragen_jax.agent.segments import Observation
from ragen_jax.envs.base import Environment
from ragen_jax.envs.outside.base import read_reward
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils.errors import UserError, short
from ragen_jax.utils.sizes import round_up
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)

# Environments in JAX play a multiple of so many rows, and those that are too many are forgotten: to compile a program
# for another number of rows takes longer than they do.
_ROWS = 32


def make_pool(spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None = None) -> Pool:
  """Makes the pool for an environment in JAX or outside it, whose `rows` are a multiple of `group_size`.

  Without the processor of a model that reads images, observations are text. Raises UserError if the model cannot read
  the images of the environment.
  """
  kind = OutsidePool if spec.env.is_outside else JaxPool
  return kind(spec, rows, group_size, processor)


def _programs_of(env: Environment) -> tuple[Callable, Callable, Callable]:
  """The programs that reset, step and draw rows of an environment. Those that are alike, as of two tags, share them."""
  try:
    hash(env)
    attributes = _attributes_of(env)
  except Exception:  # noqa: BLE001, a field that is a list, for example; hash and repr may be a user's
    return _programs.__wrapped__(env, '')
  return _programs(env, attributes)


def _attributes_of(env: Environment) -> str:
  """The attributes of an environment. Equal environments may differ in them.

  0.0 equals -0.0 and True equals 1, and fields with compare=False and what is no field are not compared.
  """
  classes = type(env).__mro__
  cached = {name for cls in classes for name, x in vars(cls).items() if isinstance(x, functools.cached_property)}
  return repr([(name, x) for name, x in vars(env).items() if name not in cached])


@functools.lru_cache(maxsize=64)
def _programs(env: Environment, attributes: str) -> tuple[Callable, Callable, Callable]:
  del attributes  # of the key

  @jax.jit
  def reset(seeds, members):
    """The states of rows, and the keys of the randomness of their games."""
    keys = jax.vmap(jax.random.key)(seeds)
    # The level depends on the group's seed only; the randomness of the game also depends on the member.
    luck = jax.vmap(lambda key, member: jax.random.fold_in(jax.random.fold_in(key, 1), member))(keys, members)
    return jax.vmap(env.reset)(keys), luck

  @jax.jit
  def step(states, actions, count, used, luck, limit):
    """The new states, rewards f32[rows, A], and the numbers of executed and of effective actions, i32[rows] each.

    Args:
      actions: i32[rows, A, *action_shape].
      count: i32[rows], number of actions to execute.
      used: i32[rows], number of actions executed in earlier turns.
      luck: [rows], keys of the randomness of the game.
      limit: number of actions after which an episode ends.
    """

    def one_row(state, actions, count, used, key):
      def one_action(carry, xs):
        state, executed = carry
        action, i = xs
        run = (i < count) & (used + executed < limit) & ~state.done
        after, out = env.step(state, action, jax.random.fold_in(key, used + executed))
        state = jax.tree.map(lambda new, old: jnp.where(run, new, old), after, state)
        return (state, executed + run), (jnp.where(run, out.reward, 0.0), out.effective & run)

      (state, executed), (rewards, effective) = jax.lax.scan(
        one_action, (state, jnp.zeros((), jnp.int32)), (actions, jnp.arange(actions.shape[0]))
      )
      return state, rewards, executed, jnp.sum(effective)  # rewards are added on the host: `Episode.score`

    return jax.vmap(one_row)(states, actions, count, used, luck)

  @functools.partial(jax.jit, static_argnames='tile')
  def draw(states, tile):
    """The boards of rows as images u8[rows, height, width, 3] with tiles of so many pixels."""
    return jax.vmap(lambda state: env.pixels(state, tile))(states)

  return reset, step, draw


class JaxPool(Pool):
  """The rows of one environment in JAX.

  Attributes:
    states: the states of the rows, with NumPy leaves [rows, ...].
    fresh_states: the states right after `reset`.
  """

  outside = False

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    super().__init__(spec, rows, group_size, processor)
    self._warned = False
    self._reset, self._step, draw = _programs_of(spec.env)
    seen = processor is not None and spec.tile is not None
    self._draw = functools.partial(draw, tile=tile_of(spec, processor)) if seen else None
    self._all_rows = round_up(rows, _ROWS)

  def _with_more(self, x: np.ndarray) -> np.ndarray:
    """An array [rows, ...] with rows for those that are played in addition."""
    return np.pad(x, [(0, self._all_rows - self.rows)] + [(0, 0)] * (x.ndim - 1))

  def _own(self, tree: Any) -> Any:
    """What a program gives, on the host and without the rows that were played in addition."""
    return jax.tree.map(lambda x: x[: self.rows], jax.device_get(tree))

  @property
  def done(self) -> np.ndarray:
    return np.asarray(self.states.done)

  @property
  def success(self) -> np.ndarray:
    return np.asarray(self.states.success)

  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    given = (self._with_more(np.asarray(x, np.uint32)) for x in (seeds, members))
    self._device_states, self._luck = self._reset(*given)
    self.used = np.zeros((self.rows,), np.int32)
    self._seeds, self.faults, self._rendered = seeds, {}, None
    self.states = self.fresh_states = self._own(self._device_states)

  def _stepped(self, actions: list[list[Any]]) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The results of the step for the actions of a turn."""
    width = self.spec.budget.max_actions_per_turn
    table = np.zeros((self._all_rows, width, *self.spec.env.action_shape), np.int32)
    count = np.zeros((self._all_rows,), np.int32)
    for i, row_actions in enumerate(actions):
      if i in self.faults:
        continue
      count[i] = min(len(row_actions), width)
      for j, action in enumerate(row_actions[:width]):
        table[i, j] = action
    used = self._with_more(self.used)
    return self._step(self._device_states, table, count, used, self._luck, self.spec.budget.max_actions)

  def states_after(self, actions: list[list[Any]]) -> Any:
    """The states, with NumPy leaves [rows, ...], that `step` would lead to; the pool does not change."""
    return self._own(self._stepped(actions)[0])

  def step(self, actions: list[list[Any]]) -> PoolStep:
    if not any(actions):  # as when the rows of other pools have replied
      none = np.zeros((self.rows,), np.int32)
      return PoolStep([()] * self.rows, none, none, [{} for _ in range(self.rows)])
    results = self._stepped(actions)
    self._rendered = None
    self._device_states = results[0]
    self.states, table, executed, effective = self._own(results)
    self.used = self.used + executed
    rewards = [tuple(own[:n]) for own, n in zip(table.tolist(), executed.tolist(), strict=True)]
    return PoolStep(self._contain(rewards), executed, effective, [{} for _ in rewards])

  def _contain(self, rewards: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The rewards, with zeros for turns that have an unusable reward; the episodes of such turns end as errors."""
    contained = list(rewards)
    for row, own in enumerate(rewards):
      fault = next((x for x in map(read_reward, own) if isinstance(x, Fault)), None)
      if fault is not None:
        self.faults[row], contained[row] = fault, (0.0,) * len(own)
        if not self._warned:
          self._warned = True
          _log.warning(FAULT_MESSAGE, self.spec.tag, self._seeds[row], fault, self.spec.tag)
    if self.faults:
      failed = np.isin(np.arange(self.rows), list(self.faults))
      self.states = self.states.replace(done=self.done | failed, success=self.success & ~failed)
    return contained

  def render(self) -> list[Observation]:
    if self._rendered is None:
      self._rendered = self._observations()
    return self._rendered

  def _observations(self) -> list[Observation]:
    env = self.spec.env
    if self._draw is None:
      found = env.render(self.states)
      if len(found) != self.rows or not all(isinstance(text, str) for text in found):
        raise UserError(f'envs.{self.spec.tag}: render returned {short(found)}; allowed: a list of {self.rows} texts')
      return found
    images = self._own(self._draw(self._device_states))
    # Copies, because a part of the array would keep all of it in memory.
    return [
      with_images(text, [image.copy() for image in np.split(stack, env.image_count)], self.processor)
      for text, stack in zip(env.captions(self.states), images, strict=True)
    ]

  def picture(self, row: int) -> np.ndarray | None:
    try:
      return self.spec.env.render_rgb(jax.tree.map(lambda x: np.asarray(x)[row], self.states))
    except NotImplementedError:  # a user's environment without pictures
      return None

  def scenes(self, rows: list[int]) -> list[Scene]:
    return self.spec.env.scenes(jax.tree.map(lambda x: np.asarray(x)[rows], self.states))

  def levels(self) -> list[bytes | None]:
    own = jax.tree.map(lambda x: np.asarray(x)[:: self.group_size], self.fresh_states)
    name = self.spec.env.name.encode()
    return [b'|'.join([name, level]) for level in self.spec.env.identities(own)]

  def legal_actions(self) -> list[list[str]]:
    env = self.spec.env
    return [[env.format_action(action) for action in own] for own in env.legal_actions(self.states)]

  def members(self, number: int, states: Any) -> Any:
    """Selects the states of the member with this number in each group, from states [rows, ...]."""
    return jax.tree.map(lambda x: np.asarray(x)[number :: self.group_size], states)

  def optimal(self) -> np.ndarray:
    """A level is solved once, for all members of its group."""
    best = self.spec.env.optimal(self.members(0, self.fresh_states), self.spec.budget)
    return np.repeat(np.asarray(best, np.float32), self.group_size)
