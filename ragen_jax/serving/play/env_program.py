"""Play: a program that plays an environment of the config; its rollout loop calls the policy over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import queue
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.episode import Status, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.serving import client
from ragen_jax.serving.rollouts.codec import encode_pixels

# `AgentTasks.runner` of environments: 'env:FrozenLake' plays the tag FrozenLake.
ENVIRONMENT = 'env:'
# Names of the rewards. An episode that succeeds gets a reward SUCCESS of 0, which only marks it.
REWARD, PENALTY, SUCCESS = 'environment', 'format', 'success'

_BUSY = 503
_PAUSE_S = 1.0  # before a call is repeated that the server had no room for


class ServedSpeaker:
  """The policy behind the endpoint speaks for one row.

  It gets the ids and the images of the whole row, as the built-in rollout feeds them, so its replies are those of the
  built-in rollout. `calls` are the ids of the calls so far, one for each turn.
  """

  writes_tokens = True

  def __init__(self, task: client.Task, model: str):
    self._task, self._model = task, model
    self.calls: list[str] = []
    self._images: list[str] = []  # data URLs of the images of the open row

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`; RuntimeError if the server refused the call."""
    if not log.live:
      return None
    (row,) = log.live
    prompt = log.prompts([row]).get(row)
    if prompt is None:
      return {}
    line, turn, tokenizer = log.timeline, len(log.past(row)), log.context.tokenizer
    if prompt.fresh:
      line.begin_row(row)
      self._images.clear()
    line.append_context(row, prompt.ids, turn, prompt.images)
    self._images += [f'data:image/png;base64,{_base64(span.segment.image)}' for span in prompt.images]
    call, ids = self._ask(line.tokens[row, : line.length[row]].tolist(), log.limits_of(row).max_response_tokens)
    line.append_reply(row, ids, turn)
    self.calls.append(call)
    (text,) = log.context.reply_texts([ids])
    return {row: TextReply(text, len(ids), ids=tuple(ids), closed=ids[-1] == tokenizer.stop_ids[0])}

  def _ask(self, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
    """The id of a call, and the ids of its reply."""
    body = {'model': self._model, 'prompt': prompt, 'max_tokens': max_tokens, 'return_token_ids': True}
    body |= {'images': [*self._images]} if self._images else {}
    deadline = time.monotonic() + self._task.timeout_s
    while True:
      status, answer = _post(f'{self._task.base_url}/completions', self._task.api_key, body, self._task.timeout_s)
      if status == 200:
        return answer['id'], answer['choices'][0]['token_ids']
      if status != _BUSY or time.monotonic() + _PAUSE_S > deadline:
        raise RuntimeError(f'the server answers with status {status}: {answer["error"]["message"]}')
      time.sleep(_PAUSE_S)


class EnvironmentProgram:
  """Plays an episode of an environment for each task {"seed": n, "member": i}; several threads may call it."""

  def __init__(self, make: Callable[[str], AgentProxy], model: str):
    """`make` gives, for 'train' or 'val', a rollout loop over one row of the environment. Each loop plays one episode
    at a time, and is used again."""
    self._make, self._model = make, model
    self._free: dict[str, queue.SimpleQueue[AgentProxy]] = {mode: queue.SimpleQueue() for mode in ('train', 'val')}

  def __call__(self, task: client.Task) -> float:
    """Plays an episode and posts its rewards; returns 0, the reward of the episode beyond those of its turns.
    RuntimeError if the environment failed, or the server refused a call."""
    free = self._free[task.mode]
    try:
      proxy = free.get_nowait()
    except queue.Empty:
      proxy = self._make(task.mode)
    speaker = ServedSpeaker(task, self._model)
    try:
      rollout = proxy.rollout(speaker, task.input['seed'], first_member=task.input['member'])
    except BaseException:
      proxy.envs.end()
      raise
    finally:
      free.put(proxy)
    (episode,) = rollout.episodes
    if episode.status == Status.ENV_ERROR:
      raise RuntimeError(episode.error)
    for call, turn in zip(speaker.calls, episode.turns, strict=True):
      for name, value in ((REWARD, turn.reward), (PENALTY, turn.penalty)):
        if value:
          client.reward(value, call=call, name=name, of=task)
    if episode.success:
      client.reward(0.0, call=speaker.calls[-1], name=SUCCESS, of=task)
    return 0.0


def _base64(image: np.ndarray) -> str:
  return base64.b64encode(encode_pixels(image)).decode()


def _post(url: str, key: str, body: dict[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
  """Status and JSON of the answer to a request."""
  parts = urllib.parse.urlsplit(url)
  connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
  headers = {'Authorization': f'Bearer {key}', 'Content-Type': 'application/json'}
  try:
    connection.request('POST', parts.path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())
  finally:
    connection.close()
