"""A server that speaks the protocol of kimina-lean-server, and knows a few tactics on goals of `∧`, `True` and `=`.

As Lean does, it reports goals that are left at the theorem's `by`, adds a theorem with an error as if by `sorryAx`, and
answers commands below the theorem. As the server does, it leaves out the imports when it counts lines.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

STANDARD = ('propext', 'Quot.sound')


class LeanError(Exception):
  """An error at a line of tactics."""


class Proof:
  """The goals of a theorem, each (hypotheses, target), and the axioms that its proof uses."""

  def __init__(self, target: str):
    self.goals: list[tuple[list[str], str]] = [([], target)]
    self.axioms: set[str] = set()
    self.sorries: list[str] = []
    self.inner: list[int] = []  # lines with goals that are left inside of a tactic

  def run(self, tactic: str, line: int) -> None:
    word, _, rest = tactic.partition(' ')
    if not self.goals and word != 'skip':
      raise LeanError('no goals to be proved')
    hypotheses, target = self.goals[0] if self.goals else ([], '')
    left, found, right = target.partition(' ∧ ')
    if word == 'constructor' and found:
      self.goals[:1] = [(hypotheses, left), (hypotheses, right)]
    elif (word, target) == ('trivial', 'True') or (word == 'rfl' and len(set(target.split(' = '))) == 1):
      self.goals.pop(0)
    elif word == 'have':  # as `have h : True := by trivial`; with `by skip` its own goal is left
      self.goals[0] = ([*hypotheses, rest.partition(' := ')[0]], target)
      self.inner += [line] * rest.endswith('by skip')
    elif word == 'show':
      self.goals[0] = (hypotheses, rest)
    elif word == 'axiomatic':
      self.axioms.add('Lean.ofReduceBool')
      self.goals.pop(0)
    elif word == 'give_up':  # `sorry` under a name that the client does not know
      self.sorries.append(target)
      self.goals.pop(0)
    elif word == 'sneak':  # `sorryAx`, of which Lean does not warn
      self.axioms.add('sorryAx')
      self.goals.pop(0)
    elif word != 'skip':
      raise LeanError(f"unknown tactic '{word}'")


def answer(code: str) -> dict[str, Any]:
  """What Lean says about a text."""
  lines = code.splitlines()
  header = 0
  while header < len(lines) and (not lines[header].strip() or lines[header].startswith('import ')):
    header += 1
  messages: list[dict[str, Any]] = []

  def tell(severity: str, number: int, text: str) -> None:
    messages.append({'severity': severity, 'pos': {'line': number - header, 'column': 0}, 'endPos': None, 'data': text})

  start = next(i for i, line in enumerate(lines) if re.match('theorem|lemma', line))
  end = next(i for i in range(start, len(lines)) if lines[i].endswith(':= by'))
  name = lines[start].split()[1]
  proof = Proof(' '.join(lines[start : end + 1]).partition(' : ')[2].removesuffix(' := by'))
  failed = False
  for number, line in enumerate(lines[end + 1 :], end + 2):
    if line.startswith('#print'):
      break
    try:
      for tactic in [line.strip().removeprefix('· ')] if line.strip() else []:
        proof.run(tactic, number)
    except LeanError as e:
      tell('error', number, str(e))
      failed = True
      break
  for number in proof.inner:
    tell('error', number, 'unsolved goals\n⊢ False')
  if proof.goals and not failed:
    shown = ['\n'.join([*hypotheses, f'⊢ {target}']) for hypotheses, target in proof.goals]
    tell('error', end + 1, 'unsolved goals\n' + '\n\n'.join(shown))
  axioms = [*STANDARD, *sorted(proof.axioms), *['sorryAx'] * bool(messages)]
  number = next(i for i, line in enumerate(lines, 1) if line.startswith('#print'))
  tell('info', number, f"'{name}' depends on axioms: [" + ',\n '.join(axioms) + ']')
  response: dict[str, Any] = {'env': 1, 'messages': messages}
  if proof.sorries:
    response['sorries'] = [{'pos': {'line': 1, 'column': 0}, 'goal': f'⊢ {goal}'} for goal in proof.sorries]
  return response


class Server(http.server.ThreadingHTTPServer):
  """Attributes: the requests so far; `trouble`, asked with the body and number of each, may answer (status, bytes)."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.requests: list[dict[str, Any]] = []
    self.keys: list[str | None] = []
    self.lock = threading.Lock()
    self.trouble: Callable[[dict[str, Any], int], tuple[int, bytes] | None] = lambda body, number: None
    self.result: Callable[[dict[str, Any], int], dict[str, Any] | None] = lambda snippet, number: None
    self.url = f'http://127.0.0.1:{self.server_address[1]}'

  def handle_error(self, request, client_address):
    """Broken connections are what some tests are about."""

  @property
  def checked(self) -> list[str]:
    """The texts of all requests."""
    return [snippet['code'] for body in self.requests for snippet in body['snippets']]


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *arguments):
    """Quiet."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    server = self.server
    with server.lock:
      server.requests.append(body)
      server.keys.append(self.headers['Authorization'])
      number = len(server.requests)
    if self.path != '/api/check':
      return self.reply(404, b'')
    trouble = server.trouble(body, number)
    if trouble is not None:
      return self.reply(*trouble)
    results = []
    for snippet in body['snippets']:
      result = server.result(snippet, number)
      if result is None and 'slowly' in snippet['code']:
        result = {'error': f'Lean REPL command timed out in {body["timeout"]} seconds'}
      results.append({'id': snippet['id'], 'time': 0.1, **(result or {'response': answer(snippet['code'])})})
    return self.reply(200, json.dumps({'results': results[::-1]}).encode())  # the order is that of the ids

  def reply(self, status: int, data: bytes) -> None:
    self.send_response(status)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    with contextlib.suppress(OSError):
      self.wfile.write(data)


@contextlib.contextmanager
def serve() -> Iterator[Server]:
  """A server on loopback."""
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()
