"""Tasks that agent programs play over HTTP, in place of an environment that the policy plays turn by turn."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar

from ragen_jax.envs.options import check_text
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.utils.tool_calls import parse_json

# Larger files are read by the agents themselves.
_LARGEST_FILE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class AgentTasks(TextEnvironment):
  """The tasks of one kind of agent. The program decides what a task means, and posts the rewards.

  Attributes:
    tasks: a file with one JSON value for each line; level number n is the line n modulo the number of lines. '' makes
      tasks of the numbers themselves: {"seed": n, "member": i}, where i numbers the episodes of a group.
    runner: what plays a task: a Python function 'package.module:function'; an environment of the config, 'env:TAG'; or
      a command, such as 'python agent.py'; '' for workers that claim tasks over HTTP.
  """

  tasks: str = ''
  runner: str = ''

  name: ClassVar[str] = 'agent'
  played_by_programs: ClassVar[bool] = True

  def __post_init__(self):
    for field in ('tasks', 'runner'):
      check_text('agent', field, getattr(self, field))
    self._lines  # noqa: B018, a file that cannot be read is reported at once

  @functools.cached_property
  def _lines(self) -> list[Any]:
    if not self.tasks:
      return []
    path = pathlib.Path(self.tasks)
    try:
      if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f'tasks={self.tasks!r}: is larger than {_LARGEST_FILE >> 30} GiB')
      text = path.read_text(encoding='utf-8')
    except OSError as e:
      raise ValueError(f'tasks={self.tasks!r}: cannot be read ({e.strerror})') from e
    except UnicodeDecodeError as e:
      raise ValueError(f'tasks={self.tasks!r}: is not UTF-8') from e
    found = []
    for number, line in enumerate(text.split('\n'), 1):
      if not line.strip():
        continue
      try:
        found.append(parse_json(line))
      except ValueError as e:
        raise ValueError(f'tasks={self.tasks!r}: line {number} is no JSON ({e})') from e
    if not found:
      raise ValueError(f'tasks={self.tasks!r}: has no line with a task')
    return found

  def task(self, seed: int, member: int) -> Any:
    """The task of an episode, a JSON value."""
    lines = self._lines
    return lines[seed % len(lines)] if lines else {'seed': seed, 'member': member}

  def rules(self) -> str:
    return 'The agent program writes the prompts.'

  def open(self, rows: int) -> Session:
    """Raises TypeError: there are no turns to play."""
    raise TypeError('the tasks of agents are not played turn by turn')
