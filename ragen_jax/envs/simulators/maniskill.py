"""The environment of type 'maniskill': the cube tasks of Manipulation with the robot arm of ManiSkill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ragen_jax.envs import manipulation_tasks as tasks
from ragen_jax.envs.dataset import selection
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.manipulation import Manipulation, State
from ragen_jax.envs.manipulation_tasks import Table
from ragen_jax.envs.options import check_choice
from ragen_jax.envs.scenes import TICK, TableScene
from ragen_jax.envs.simulators.base import SimulatorEnvironment, Told
from ragen_jax.envs.solvers import manipulation as solver

TASKS = ('align', 'place', 'stack')
_RENDER = ('gpu', 'cpu')
# A cube that is moved less, in millimetres along each axis, was not moved. Cubes at rest are as near to a height that
# the rules know.
_SLACK = 5


@dataclasses.dataclass(frozen=True, eq=False)
class ManiSkillEnvironment(SimulatorEnvironment):
  """Cubes on a table, moved by a robot arm. The levels are those of `Manipulation` with the same seeds and split.

  Attributes:
    render: where pictures are drawn: on the 'gpu', or on the 'cpu', which needs a driver of Vulkan such as lavapipe.
  """

  name: ClassVar[str] = 'maniskill'
  has_expert: ClassVar[bool] = True
  has_legal_actions: ClassVar[bool] = True
  observations: ClassVar[tuple[str, ...]] = ('image', 'text')

  world: Manipulation
  render: str = 'gpu'

  def __post_init__(self):
    super().__post_init__()
    check_choice('maniskill', 'simulator.render', self.render, _RENDER)
    task, cameras = self.world.task, self.world.cameras
    if task not in TASKS:
      told = f'{", ".join(TASKS)}, since the apple and the cabinet are no part of the package'
      raise ValueError(f'maniskill: task={task!r}; allowed: {told}')
    if cameras != 1:
      raise ValueError(f"maniskill: cameras={cameras}; allowed: 1, with type='maniskill'")

  @property
  def settings(self) -> dict[str, Any]:
    task = self.world.task_of_levels
    size = self.size if self.observation == 'image' else 0
    return {
      'cubes': task.objects, 'targets': task.targets, 'home': task.home, 'size': size, 'render': self.render
    }  # fmt: skip

  # -- the game --------------------------------------------------------------------------------------------------------

  def level(self, seed: int) -> State:
    return jax.device_get(_reset(self.world, np.uint32(seed)))

  def level_id(self, seed: int) -> str:
    return selection.digest(f'{self.name} {self.world.task} {self.start_of(self.level(seed))}')

  def start_of(self, level: State) -> list[list[int]]:
    return level.table.places.tolist()

  def order_of(self, action: str) -> list[Any]:
    skill, *numbers = self.world.parse_action(action)
    return [tasks.SKILLS[skill], *numbers[: tasks.NUMBERS[skill]]]

  def begin(self, level: State, state: Mapping[str, Any]) -> State:
    return level.replace(table=self._table(state))

  def go_on(self, play: State, state: Mapping[str, Any]) -> Told:
    table, before = self._table(state), play.table
    changed = bool(table.held != before.held or (np.abs(table.places - before.places) > _SLACK).any())
    after, success = map(np.asarray, _worth(self.world.task_of_levels, table))
    earned = float(after - np.asarray(_worth(self.world.task_of_levels, before)[0])) - tasks.SKILL_COST
    play = play.replace(table=table, blocked=np.bool_(not changed), done=success, success=success)
    return Told(play, earned, bool(success), bool(success), changed)

  def _table(self, state: Mapping[str, Any]) -> Table:
    """The table with whole millimetres, and the heights of cubes at rest as the rules have them."""
    places = np.array(state['places'], np.int32)
    half = self.world.task_of_levels.half
    levels = half + 2 * half * np.round((places[:, 2] - half) / (2 * half)).astype(np.int32).clip(0)
    at_rest = (np.abs(places[:, 2] - levels) <= _SLACK) & (np.arange(len(places)) != state['held'])
    places[:, 2] = np.where(at_rest, levels, places[:, 2])
    return Table(places, np.int32(state['held']), np.int32(0))

  # -- text ------------------------------------------------------------------------------------------------------------

  def text_of(self, play: State) -> str:
    text = self.world.render(_batch(play))[0]
    return text if self.image_form is None else f'{text}\n{IMAGE_MARK}'

  def scene_of(self, play: State) -> TableScene:
    """As `Manipulation.scenes`; what has left the workspace is at its border."""
    task = self.world.task_of_levels
    low, high = (np.array([*bound[:2], side * 1000]) for bound, side in ((task.low, -1), (task.high, 1)))
    places = play.table.places.clip(low - TICK // 2, high + TICK // 2)
    return self.world.scenes(_batch(play.replace(table=play.table.replace(places=places))))[0]

  # -- play of others --------------------------------------------------------------------------------------------------

  def plan_of(self, play: State) -> tuple[list[str], str]:
    """The plan of `Manipulation` from here, as if the skills were exact."""
    states = _batch(play)
    skills = solver.play(self.world, states, np.array([len(tasks.SKILLS) * 2]))[0][0]
    actions = [self.world.format_action(skill) for skill in skills]
    # A place that a simulated cube has rolled to may be outside the workspace.
    ends = next((i for i, action in enumerate(actions) if self.world.parse_action(action) is None), len(actions))
    return actions[:ends], self.world.rationale(states)[0] if ends else ''

  def legal_of(self, play: State) -> list[str]:
    return [self.world.format_action(skill) for skill in self.world.legal_actions(_batch(play))[0]]


def _batch(play: State) -> State:
  return jax.tree.map(lambda leaf: np.asarray(leaf)[None], play)


@functools.partial(jax.jit, static_argnums=0)
def _reset(world: Manipulation, seed: jax.Array) -> State:
  return world.reset(jax.random.key(seed))


_worth = jax.jit(tasks.worth, static_argnums=0)
