"""The tasks of a search: disjoint ranges for critiques, for selection and for the final comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from ragen_jax.envs import AgentTasks
from ragen_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Task:
  """A task by its place in the tasks of a tag."""

  tag: str  # the environment in the config
  env: AgentTasks  # gives the task
  number: int  # see `AgentTasks.task`


@dataclasses.dataclass(frozen=True)
class TaskRanges:
  """Where the tasks come from, as (tag, environment); task i of a range is of tag i modulo the number of tags."""

  train: tuple[tuple[str, AgentTasks], ...]
  held_out: tuple[tuple[str, AgentTasks], ...]
  train_first: int  # number of the first training task
  held_out_first: int  # number of the first held-out task
  scored: int  # number of held-out tasks on which prompts are scored; the final ones follow

  def for_critiques(self, start: int, count: int) -> list[Task]:
    """Training tasks from the one at `start`."""
    return _range(self.train, self.train_first, start, count)

  def for_scores(self) -> list[Task]:
    """The held-out tasks on which every prompt is scored."""
    return _range(self.held_out, self.held_out_first, 0, self.scored)

  def for_the_end(self, count: int) -> list[Task]:
    """Held-out tasks that no score has used."""
    return _range(self.held_out, self.held_out_first, self.scored, count)

  def check(self, critiqued: int, final: int) -> None:
    """Checks that no task is in two ranges: a file may have fewer lines than are asked for, or equal lines.

    Critiques may see `critiqued` training tasks; the final comparison has `final` held-out ones. Raises UserError if a
    task is in two ranges, or twice among those of the final comparison or of the scores.
    """
    seen: dict[str, str] = {}
    # Training tasks may repeat.
    for task in self.for_critiques(0, critiqued):
      seen[_content(task)] = f'training task {task.number} of {task.tag}'
    for what, tasks in (('prompt.held_out', self.for_scores()), ('prompt.final', self.for_the_end(final))):
      for task in tasks:
        before = seen.setdefault(_content(task), own := f'held-out task {task.number} of {task.tag}')
        if before != own:
          raise UserError(
            f'{what}={len(tasks)}: {own} is the same as {before}; the search needs {self.scored + final} different '
            'held-out tasks that are no training tasks, so give eval.tags more tasks, or lower prompt.held_out and '
            'prompt.final'
          )


def _range(tags: Sequence[tuple[str, AgentTasks]], first: int, start: int, count: int) -> list[Task]:
  return [Task(*tags[i % len(tags)], first + i) for i in range(start, start + count)]


def _content(task: Task) -> str:
  return json.dumps(task.env.task(task.number, 0), sort_keys=True)
