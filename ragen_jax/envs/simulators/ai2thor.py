"""The environment of type 'ai2thor': the game of Navigation in scenes of AI2-THOR, with VAGEN's files of tasks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ragen_jax.envs.dataset import selection
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.navigation import Navigation
from ragen_jax.envs.options import check_choice, check_text
from ragen_jax.envs.scenes import DIRECTIONS, Place, RoomScene, Vocabulary, room_vocabulary
from ragen_jax.envs.simulators.base import SimulatorEnvironment, Told
from ragen_jax.envs.splits import SPLITS
from ragen_jax.utils.errors import describe_error, one_line

PLATFORMS = ('', 'CloudRendering', 'Linux64', 'OSXIntel64')
# The package's actions, in the order of `Navigation.action_names`.
_ACTIONS = ('MoveAhead', 'MoveBack', 'MoveRight', 'MoveLeft', 'RotateRight', 'RotateLeft', 'LookUp', 'LookDown')
# Sectors of 45 degrees, clockwise.
_SECTORS = (
  'ahead', 'ahead to the right', 'to the right', 'behind to the right', 'behind', 'behind to the left', 'to the left',
  'ahead to the left',
)  # fmt: skip
_LARGEST_FILE = 64 << 20


@dataclasses.dataclass(frozen=True)
class Task:
  """A start in a scene and an object to find.

  Attributes:
    start: see `ai2thor_worker.ThorGame.reset`.
    kind: the type of the target, such as 'CoffeeMachine'.
    ids: the objects that are the target; () for all of its type.
    place: x, z of the target, in metres.
    instruction: what the policy reads.
  """

  start: Mapping[str, Any]
  kind: str
  ids: tuple[str, ...]
  place: tuple[float, float]
  instruction: str

  @functools.cached_property
  def id(self) -> str:
    """Equal for tasks with equal start and target, in whatever words they are told."""
    return selection.digest(json.dumps(['ai2thor', self.start, self.kind, self.place], sort_keys=True))


@dataclasses.dataclass(frozen=True)
class Play:
  """An episode: its task, the last state that the simulator told, and the actions so far."""

  task: Task
  state: Mapping[str, Any]
  steps: int = 0


class ThorScene(RoomScene):
  """As a room's, where `things` have indices of the words of both parts in place of places."""

  def relation(self, place: Place) -> tuple[int, int]:
    return place


@dataclasses.dataclass(frozen=True, eq=False)
class ThorEnvironment(SimulatorEnvironment):
  """Find an object in a scene of AI2-THOR, by `Navigation`'s actions and rule of success, from first-person frames.

  Attributes:
    tasks: a JSON file with a list of tasks, or with it under 'tasks', see `read_tasks`.
    executable: the program of Unity; '' for the build that the package downloads.
    platform: of this build, of `PLATFORMS`; '' for what the package chooses.
  """

  name: ClassVar[str] = 'ai2thor'

  world: Navigation
  tasks: str = ''
  executable: str = ''
  platform: str = ''

  def __post_init__(self):
    super().__post_init__()
    check_text('ai2thor', 'simulator.executable', self.executable)
    if self.executable and not pathlib.Path(self.executable).is_file():
      raise ValueError(f"ai2thor: simulator.executable={self.executable!r}; allowed: the path of a program, or ''")
    check_choice('ai2thor', 'simulator.platform', self.platform, PLATFORMS)
    check_text('ai2thor', 'simulator.tasks', self.tasks)
    self._tasks  # noqa: B018, a file that cannot be read is reported at once

  @functools.cached_property
  def _tasks(self) -> tuple[Task, ...]:
    """The tasks of the part that is played: a hash of a scene's name decides to which part its tasks belong."""
    found, (low, high) = read_tasks(self.tasks), SPLITS[self.world.split]
    part = tuple(task for task in found if low <= int(selection.digest(task.start['scene']), 16) % 10 < high)
    if not part:
      raise ValueError(
        f'ai2thor: simulator.tasks={self.tasks!r}: none of {len(found)} tasks is in a scene of the part '
        f"split={self.world.split!r}; allowed: a file with more scenes, or split='all'"
      )
    return part

  @functools.cached_property
  def _kinds(self) -> dict[str, str]:
    """Types of objects that are targets of any part -> their names, in the order of the names."""
    return {kind: _name(kind) for kind in sorted({task.kind for task in read_tasks(self.tasks)})}

  @property
  def settings(self) -> dict[str, Any]:
    return {
      'first': self._tasks[0].start, 'executable': self.executable and str(pathlib.Path(self.executable).absolute()),
      'platform': self.platform, 'size': self.size, 'fov': self.world.fov, 'stride': self.world.stride,
      'timeout_s': self.step_timeout_s,
    }  # fmt: skip

  @property
  def scene_words(self) -> Vocabulary:
    return room_vocabulary(tuple(self._kinds.values()))

  # -- the game --------------------------------------------------------------------------------------------------------

  def level(self, seed: int) -> Task:
    return self._tasks[selection.select(seed, len(self._tasks), 'shuffled')]

  def level_id(self, seed: int) -> str:
    return self.level(seed).id

  def start_of(self, level: Task) -> dict[str, Any]:
    return dict(level.start)

  def order_of(self, action: str) -> str:
    return _ACTIONS[self.action_names.index(action)]

  def begin(self, level: Task, state: Mapping[str, Any]) -> Play:
    return Play(level, state)

  def go_on(self, play: Play, state: Mapping[str, Any]) -> Told:
    play = Play(play.task, state, play.steps + 1)
    # Metres of a float32; a step that ends exactly at the radius is within it.
    success = math.dist(state['place'], play.task.place) <= self.world.radius + 1e-4
    if self.world.must_see:
      success = success and any(self._is_target(play.task, *thing[:2]) for thing in state['objects'])
    done = success or play.steps >= self.world.max_steps
    return Told(play, self.world.success_reward * success, done, success, state['moved'])

  def _is_target(self, task: Task, thing: str, kind: str) -> bool:
    return thing in task.ids if task.ids else kind == task.kind

  # -- text ------------------------------------------------------------------------------------------------------------

  def text_of(self, play: Play) -> str:
    blocked = '' if play.state['moved'] else ' The last action was blocked.'
    return f'{play.task.instruction}{blocked}\n{IMAGE_MARK}'

  def scene_of(self, play: Play) -> ThorScene:
    """The target, in view or not, and of each other kind in view the nearest object."""
    (x, z), task = play.state['place'], play.task
    seen = sorted(play.state['objects'], key=lambda thing: math.dist(thing[2:], (x, z)))
    things = {self._kinds[task.kind]: (self._relation(play, task.place),)}
    for _, kind, *place in seen:
      if kind in self._kinds:
        things.setdefault(self._kinds[kind], (self._relation(play, place),))
    return ThorScene((0, 0), things, 0, self._kinds[task.kind], 0, self.scene_words.kinds)

  def _relation(self, play: Play, place: Any) -> tuple[int, int]:
    """Where a place x, z is, as indices of the words of both parts: a sector of 45 degrees, and a distance."""
    x, z = (there - here for there, here in zip(place, play.state['place'], strict=True))
    angle = math.degrees(math.atan2(x, z)) - play.state['rotation']
    far, radius = math.hypot(x, z), self.world.radius + 1e-4
    return DIRECTIONS.index(_SECTORS[round(angle / 45) % 8]), (far > radius) + (far > 2 * radius)


def read_tasks(file: str) -> tuple[Task, ...]:
  """The tasks of a JSON file in VAGEN's form: a list, or an object with the list under 'tasks'.

  A task has 'scene'; 'agentPose' with 'position' {'x', 'y', 'z'}, 'rotation' (degrees, or an object with 'y') and
  'horizon'; 'targetObjectType'; 'target_position' {'x', 'z'}; and may have 'targetObjectIds', one id or a list, and
  'instruction'.

  Raises:
    ValueError: the file cannot be read, or a task lacks something; one line names it.
  """
  where = f'ai2thor: simulator.tasks={file!r}'
  if not file:
    raise ValueError(f"{where}; allowed: a JSON file of tasks, see docs/simulators.md, with type='ai2thor'")
  path = pathlib.Path(file).expanduser()
  try:
    status = path.stat()
    if status.st_size > _LARGEST_FILE:
      raise ValueError(f'{where}: it has {status.st_size:,} bytes; allowed: at most {_LARGEST_FILE:,}')
  except OSError as e:
    raise ValueError(f'{where}: cannot be read ({e.strerror})') from e
  return _read_tasks(where, path, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_tasks(where: str, path: pathlib.Path, changed: int) -> tuple[Task, ...]:
  del changed
  try:
    read = json.loads(path.read_text(encoding='utf-8'))
  except OSError as e:
    raise ValueError(f'{where}: cannot be read ({e.strerror})') from e
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{where}: is no JSON ({describe_error(e)})') from e
  raw = read.get('tasks') if isinstance(read, dict) else read
  if not isinstance(raw, list) or not raw:
    raise ValueError(f"{where}: has no tasks; allowed: a list of tasks, or an object with the list under 'tasks'")
  found = []
  for number, task in enumerate(raw):
    try:
      found.append(_read_task(task))
    except (KeyError, TypeError, ValueError) as e:
      raise ValueError(f'{where}: task {number} cannot be read ({describe_error(e)})') from e
  return tuple(found)


def _read_task(raw: Any) -> Task:
  pose, at = raw['agentPose'], raw['target_position']
  rotation, ids, scene, kind = pose['rotation'], raw.get('targetObjectIds') or (), raw['scene'], raw['targetObjectType']
  for text in (scene, kind):
    if not isinstance(text, str) or not text:
      raise TypeError(f'{one_line(text)} is no name')
  start = {
    'scene': scene, 'position': {axis: _finite(pose['position'][axis]) for axis in 'xyz'},
    'rotation': _finite(rotation['y'] if isinstance(rotation, dict) else rotation),
    'horizon': _finite(pose.get('horizon', 0)),
  }  # fmt: skip
  instruction = raw.get('instruction') or f'Find the {_name(kind)}.'
  ids = (ids,) if isinstance(ids, str) else tuple(map(str, ids))
  return Task(start, kind, ids, (_finite(at['x']), _finite(at['z'])), ' '.join(str(instruction).split()))


def _finite(number: Any) -> float:
  if not math.isfinite(number):
    raise ValueError(f'{number} is no length')
  return float(number)


def _name(kind: str) -> str:
  """'coffee machine' of 'CoffeeMachine'."""
  return ' '.join(re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+', kind)).lower() or kind.lower()
