"""Programs and critics of tests of the prompt search, without a server."""

from __future__ import annotations

import json
import re

from ragen_jax.envs import AgentTasks
from ragen_jax.prompt_search.player import Attempt
from ragen_jax.prompt_search.search import SearchSettings
from ragen_jax.prompt_search.tasks import TaskRanges
from ragen_jax.prompt_search.wording import Failure


def ranges(scored=4, train_first=1000, held_out_first=10) -> TaskRanges:
  """Tasks that are their numbers."""
  env = AgentTasks()
  return TaskRanges((('Train', env),), (('Val', env),), train_first, held_out_first, scored)


def settings(**changes) -> SearchSettings:
  """A small search."""
  given = dict(rounds=2, beam=2, branches=2, tasks=2, final=3, max_chars=40, shown_chars=4000)
  return SearchSettings(**given | changes)


def attempt(score, *, failed=False, number=0) -> Attempt:
  """An attempt that succeeded if its score is at least 1."""
  error = 'it broke' if failed else ''
  shown = Failure(json.dumps({'seed': number}), score, error, (('the board', 'my move'),))
  return Attempt(score, failed, score >= 1 and not failed, shown)


class Programs:
  """Plays at once.

  Attributes:
    played: (prompt, tag, number) of every task, in order.
  """

  def __init__(self, score):
    """Takes the score of a prompt at the task of a number; None for an attempt that fails."""
    self.played, self._score = [], score

  def try_prompts(self, trials):
    return [[[self._attempt(prompt, task)] for task in tasks] for prompt, tasks in trials]

  def _attempt(self, prompt, task):
    self.played.append((prompt, task.tag, task.number))
    score = self._score(prompt, task.number)
    return attempt(0.0 if score is None else score, failed=score is None, number=task.number)


class Script:
  """A critic that follows a script.

  Attributes:
    critiques, edits: the requests so far.
  """

  at_a_time = 3

  def __init__(self, edit, critique=lambda text: 'Write it better.'):
    """Takes what it says to requests: texts, or None for a lost reply. `edit` gets the prompt."""
    self.critiques, self.edits = [], []
    self._edit, self._critique = edit, critique

  def replies(self, chats):
    assert 0 < len(chats) <= self.at_a_time
    return [self._reply(chat[-1]['content']) for chat in chats]

  def _reply(self, text):
    if '<prompt>' not in text:
      self.critiques.append(text)
      return self._critique(text)
    self.edits.append(text)
    return self._edit(quoted_prompt(text))


def quoted_prompt(request: str) -> str:
  """The prompt in a request to the critic."""
  quoted = re.search(r'instructions:\n((?:\| .*\n)+)', request)[1]
  return '\n'.join(line.removeprefix('| ') for line in quoted.splitlines())


def tagged(text: str) -> str:
  """A new prompt as the critic is asked to write it."""
  return f'<prompt>\n{text}\n</prompt>'
