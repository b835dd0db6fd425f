"""Servers of kimina-lean-server, which check Lean texts: `POST /api/check`, many texts in one request.

    {"snippets": [{"id": "0", "code": "..."}, ...], "timeout": 30, "reuse": true}
    {"results": [{"id": "0", "response": {"messages": [{"severity": "error", "pos": {"line": 4, "column": 2}, "data":
                  "..."}, ...], "sorries": [...]}},
                 {"id": "1", "error": "Lean REPL command timed out in 30 seconds"}, ...]}

A text that takes too long is the answer's fault, and the policy reads so. Everything else that goes wrong is a `Fault`:
no answer, status 429 (no process of Lean is free) after all tries, and a process that fails, also at the second try.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.envs.lean.proofs import Checked, Draft, Outcome, read_messages, read_outcome
from ragen_jax.envs.outside.timed_http import JsonRequests, in_parts
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.keys import read_key
from ragen_jax.utils.threads import Fault

# The environment variable with the key of the server, which the server reads too.
KEY_VARIABLE = 'LEAN_SERVER_API_KEY'
_FAILED = 'Lean failed'


@dataclasses.dataclass(frozen=True)
class LeanServerSettings:
  """Options of the environment that its server needs, see `LeanEnvironment`."""

  url: str
  tactic_timeout_s: int
  timeout_s: float
  retries: int
  backoff_s: float
  batch_size: int
  workers: int


class LeanServer:
  """Checks texts on a server. Several requests are sent at a time, see `in_parts`."""

  def __init__(self, settings: LeanServerSettings):
    """Sends nothing; UserError if the key cannot be sent."""
    self._settings = s = settings
    self._url = s.url.rstrip('/').removesuffix('/api/check') + '/api/check'
    key = read_key(KEY_VARIABLE)
    headers = {'Authorization': f'Bearer {key}'} if key else {}
    self._requests = JsonRequests(s.timeout_s, s.retries + 1, s.backoff_s, headers)

  def check(self, drafts: Sequence[Draft]) -> list[Outcome | Fault]:
    """The outcome of each text. Equal texts are checked once; those on which a process failed, a second time."""
    first = dict.fromkeys(draft.code for draft in drafts)
    found = dict(zip(first, self._ask_all(list(first)), strict=True))
    again = [code for code, result in found.items() if isinstance(result, Fault) and result.kind == _FAILED]
    if again and self._settings.retries:
      found |= dict(zip(again, self._ask_all(again), strict=True))
    return [self._outcome(draft, found[draft.code]) for draft in drafts]

  @staticmethod
  def _outcome(draft: Draft, result: Checked | Fault) -> Outcome | Fault:
    if isinstance(result, Fault):
      return result
    outcome = read_outcome(draft, result)
    return outcome if outcome.is_read else Fault('server answered in another form', outcome.reason)

  def _ask_all(self, codes: list[str]) -> list[Checked | Fault]:
    s = self._settings
    limits = {'workers': s.workers, 'timeout_s': self._requests.longest_s, 'owner': self}
    return in_parts(codes, s.batch_size, self._ask, what='check', **limits)

  def _ask(self, codes: Sequence[str]) -> list[Checked | Fault]:
    """The answers to one request; raises NoAnswer."""
    snippets = [{'id': str(i), 'code': code} for i, code in enumerate(codes)]
    body = {'snippets': snippets, 'timeout': self._settings.tactic_timeout_s, 'reuse': True}
    results = self._requests.post(self._url, body, functools.partial(_results, count=len(codes)))
    return [_read_result(result) for result in results]


def _results(answer: bytes, count: int) -> list[Mapping[str, Any]]:
  """The results of an answer in the order of the texts; raises ValueError if it has others."""
  read = json.loads(answer)
  results = read.get('results') if isinstance(read, dict) else None
  if not isinstance(results, list) or not all(isinstance(x, dict) for x in results):
    raise ValueError(f'the answer has no list of results: {short(read)}')
  by_id = {x.get('id'): x for x in results}
  if len(results) != count or set(by_id) != {str(i) for i in range(count)}:
    raise ValueError(f'{count} texts were sent, results of {short(list(by_id))} came back')
  return [by_id[str(i)] for i in range(count)]


def _read_result(result: Mapping[str, Any]) -> Checked | Fault:
  """What the server says about one text."""
  error, response = result.get('error'), result.get('response')
  if error:
    told = error if isinstance(error, str) else short(error)
    # A time-out while Lean loads its library is not the proof's.
    if 'timed out' in told and 'header' not in told:
      return Checked(timed_out=True)
    return Fault(_FAILED, told)
  if not isinstance(response, Mapping):
    return Fault('server answered neither a response nor an error', short(result))
  if 'message' in response:
    return Fault(_FAILED, one_line(response['message'], str))
  try:
    return read_messages(response)
  except ValueError as e:
    return Fault('server answered in another form', str(e))
