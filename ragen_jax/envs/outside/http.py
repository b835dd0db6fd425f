"""Environments on a server: batches of episodes over a small JSON protocol, with time limits and retries.

All requests are POST with a JSON body. `episodes` is a list; the list of an answer has the order of its request.

    /reset  {"options": {...}, "episodes": [{"id": "8f..-0", "seed": 10003, "member": 2}, ...]}
            {"episodes": [{"observation": "..."}, ...]}
    /step   {"episodes": [{"id": "8f..-0", "step": 0, "action": "Left"}, ...]}
            {"episodes": [{"observation": "...", "reward": 0.5, "done": false, "success": false}, ...]}
    /close  {"episodes": [{"id": "8f..-0"}, ...]}
            anything

- `id` is the client's name for the episode. A /reset of a known id starts the episode again.
- `seed` determines the level, and `member` seeds all other randomness. Equal seeds give equal first observations.
- `step` counts the actions of an episode from 0. The client repeats a request if the answer is lost. A server that has
  already executed action number `step` of an episode must then return the same answer and not execute it again.
- With the options `images` and `image_size`, an observation is {"text": "...", "images": ["..."]}; each image is a PNG
  file as base64.
- An answer may repeat the `id` of its episode. One with another id ends the episode as an error.
- {"error": "..."} instead of an episode's answer ends that episode as an error. `success` may be missing until the game
  is over; `effective` (optional) tells whether the action changed anything; `metrics` (optional) has numbers by name.
- /close ends episodes, including some that are over. A client that crashes closes nothing, so a server should drop
  episodes without requests after a while.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import socket
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.options import (
  check_action_names,
  check_json,
  check_legend,
  check_seconds,
  check_text,
  check_url,
  check_whole_number,
  check_wording,
)
from ragen_jax.envs.outside.base import FREE_TEXT, Session, TextEnvironment
from ragen_jax.envs.outside.images import check_image_options, decode_images
from ragen_jax.envs.outside.timed_http import JsonRequests, in_parts
from ragen_jax.utils.errors import describe_error, short
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class HttpEnvironment(TextEnvironment):
  """A game on a server that speaks the protocol of this module.

  Attributes:
    url: the base address of /reset, /step and /close, http or https. Proxies are not used.
    task: the game and its aim, for the prompt.
    action_names: the words that are actions; without them every text is an action.
    action_help: one line about the form of an action.
    symbols: symbol to meaning, for the prompt, if the text is a board.
    whole_answer, system, state_label, counts_turns: what an action is, and the wording of prompts; see `Game`.
    options: options for the server, sent with each /reset.
    timeout_s: time limit of one request, from the connection to the end of the answer, in seconds.
    retries: maximum number of repetitions of a request without an answer or with a temporary error status.
    backoff_s: seconds before the second try, doubled before each further try, at most 30.
    batch_size: number of episodes in one request.
    workers: number of simultaneous requests.
    images: number of images in each observation, see envs/outside/images.py; 0 for text alone.
    image_size: (height, width) of every image, in pixels.
  """

  name: ClassVar[str] = 'http'
  any_thread: ClassVar[bool] = True

  url: str = ''
  task: str = ''
  action_names: tuple[str, ...] = ()
  action_help: str = ''
  symbols: Mapping[str, str] = dataclasses.field(default_factory=dict)
  whole_answer: bool = False
  system: str = ''
  state_label: str = 'State'
  counts_turns: bool = True
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  timeout_s: float = 30.0
  retries: int = 3
  backoff_s: float = 0.5
  batch_size: int = 64
  workers: int = 4
  images: int = 0
  image_size: tuple[int, int] = (0, 0)

  def __post_init__(self):
    check_url('http', 'url', self.url)
    check_text('http', 'task', self.task, blank=False)
    check_text('http', 'action_help', self.action_help)
    check_wording('http', self.system, self.state_label, self.counts_turns, self.whole_answer)
    for field in ('timeout_s', 'backoff_s'):
      check_seconds('http', field, getattr(self, field))
    for field, least in (('retries', 0), ('batch_size', 1), ('workers', 1)):
      check_whole_number('http', field, getattr(self, field), least)
    values = {
      'action_names': check_action_names('http', self.action_names),
      'symbols': check_legend('http', 'symbols', self.symbols),
      'options': check_json('http', 'options', self.options),
      'image_form': check_image_options('http', self.images, self.image_size),
    }
    if not values['action_names'] and not self.action_help:
      values['action_help'] = FREE_TEXT
    for field, value in values.items():
      object.__setattr__(self, field, value)

  def rules(self) -> str:
    return self.task

  def legend(self) -> dict[str, str]:
    return self.symbols

  def check(self) -> None:
    """Connects to the server, and sends nothing."""
    parts = urllib.parse.urlsplit(self.url)
    address = parts.hostname, parts.port or (443 if parts.scheme == 'https' else 80)
    try:
      socket.create_connection(address, timeout=self.timeout_s).close()
    except OSError as e:
      raise ValueError(f'http: url={self.url!r}: no server can be reached there ({describe_error(e)})') from e

  def open(self, rows: int) -> HttpSession:
    """A session of episodes on the server. Nothing is sent before the first reset."""
    return HttpSession(self, rows)


class HttpSession(Session):
  """The episodes of one client.

  Several requests of one call are sent at a time, see `in_parts`.
  """

  def __init__(self, env: HttpEnvironment, rows: int):
    self._env = env
    self._client, self._count = uuid.uuid4().hex, 0
    self._ids: dict[int, str] = {}  # row -> id of its episode on the server
    self._steps = [0] * rows
    self._requests = JsonRequests(env.timeout_s, env.retries + 1, env.backoff_s)
    self._warned_of_end = False

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    self.end()
    episodes = []
    for row, seed, member in zip(rows, seeds, members, strict=True):
      self._ids[row], self._steps[row] = f'{self._client}-{self._count}', 0
      self._count += 1
      episodes.append({'id': self._ids[row], 'seed': int(seed), 'member': int(member)})
    answers = self._ask('reset', rows, episodes, options=self._env.options)
    return [a if isinstance(a, Fault) else self._observation(a) for a in answers]

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    episodes = [
      {'id': self._ids[row], 'step': self._steps[row], 'action': action}
      for row, action in zip(rows, actions, strict=True)
    ]
    for row in rows:
      self._steps[row] += 1
    answers = self._ask('step', rows, episodes)
    return [a if isinstance(a, Fault) else (self._observation(a), a.get('reward'), a.get('done'), a) for a in answers]

  def _observation(self, answer: Mapping[str, Any]) -> Any:
    """The observation of an answer, with its PNG files as arrays."""
    raw, form = answer.get('observation'), self._env.image_form
    return raw if form is None else decode_images(raw, form)

  def end(self) -> None:
    """Closes all episodes that may be open on the server; the server must drop those that cannot be closed."""
    rows = list(self._ids)
    if rows:
      answers = self._ask('close', rows, [{'id': self._ids[row]} for row in rows])
      faults = [a for a in answers if isinstance(a, Fault)]
      if faults and not self._warned_of_end:
        self._warned_of_end = True
        _log.warning('http: %d episodes may stay open on the server (logged once): %s', len(faults), faults[0])
    self._ids.clear()

  def _ask(self, what: str, rows: Sequence[int], episodes: list[dict[str, Any]], **common: Any) -> list[Any]:
    """The answer of each episode, a mapping or a `Fault`; {} for each episode that is closed."""
    env = self._env
    requests = dataclasses.replace(self._requests, tries=1) if what == 'close' else self._requests
    url = f'{env.url.rstrip("/")}/{what}'

    def read(answer: bytes, count: int) -> list[Any]:
      if what == 'close':
        return [{}] * count
      found = json.loads(answer)['episodes']
      if not isinstance(found, list) or len(found) != count:
        raise ValueError(f'{count} episodes were sent, another number came back')
      return found

    def ask(part: Sequence[dict[str, Any]]) -> list[Any]:
      return requests.post(url, {**common, 'episodes': part}, functools.partial(read, count=len(part)))

    limits = {'workers': env.workers, 'timeout_s': requests.longest_s, 'owner': env}
    answers = in_parts(episodes, env.batch_size, ask, what=what, **limits)
    for row, answer in zip(rows, answers, strict=True):
      if isinstance(answer, Fault):
        self._ids.pop(row, None)  # nothing remains to be closed
    return [_read(what, episode['id'], answer) for episode, answer in zip(episodes, answers, strict=True)]


def _read(what: str, episode: str, answer: Any) -> Mapping[str, Any] | Fault:
  """The answer for the episode with this id, checked as far as all requests are alike."""
  if isinstance(answer, Fault):
    return answer
  if not isinstance(answer, Mapping):
    return Fault(f'{what} answered no object', short(answer))
  if 'error' in answer:
    error = answer['error']
    return Fault(f'{what} answered an error', error if isinstance(error, str) else short(error))
  if answer.get('id', episode) != episode:
    return Fault(f'{what} answered another episode', short(answer['id']))
  return answer
