"""Agent programs of tests."""

from __future__ import annotations

import json
import urllib.request

from ragen_jax.serving.client import Task


def broken(task: Task) -> float:
  """Raises."""
  raise RuntimeError('the program is broken')


def forgetful(task: Task) -> float | None:
  """Asks once; members other than the first of a group forget the reward."""
  from docs.examples.frozenlake import ask

  ask(task, [{'role': 'user', 'content': 'Say something.'}, {'role': 'assistant', 'content': ''}])
  return None if task.input['member'] else 1.0


def starred(task: Task) -> float:
  """Asks once; the reward is a tenth for each star of the prompt."""
  body = {'model': 'policy', 'messages': [{'role': 'user', 'content': task.prompt}], 'max_tokens': 2}
  headers = {'Authorization': f'Bearer {task.api_key}', 'Content-Type': 'application/json'}
  request = urllib.request.Request(f'{task.base_url}/chat/completions', json.dumps(body).encode(), headers)
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  with opener.open(request, timeout=task.timeout_s) as answer:
    json.load(answer)
  return task.prompt.count('*') / 10
