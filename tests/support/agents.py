"""Agent programs of tests."""

from __future__ import annotations

from ragen_jax.serving.client import Task


def broken(task: Task) -> float:
  """Raises."""
  raise RuntimeError('the program is broken')


def forgetful(task: Task) -> float | None:
  """Asks once; members other than the first of a group forget the reward."""
  from docs.examples.frozenlake import ask

  ask(task, [{'role': 'user', 'content': 'Say something.'}, {'role': 'assistant', 'content': ''}])
  return None if task.input['member'] else 1.0
