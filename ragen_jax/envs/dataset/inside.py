"""Runs in sandboxes: `serve` calls functions of a program, and `judge` runs assertions about them in a second sandbox.

Both talk by lines of JSON over the pipes that they start with. The file is copied into sandboxes and needs nothing but
Python's library, from 3.8 on. Nothing that decides a verdict is known to `serve`, whose process belongs to the program:
not the expected results, and not the assertions.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import traceback
import types

_SMALL = 1 << 62  # larger integers are written in hexadecimal, which Python reads at any length


# -- values ------------------------------------------------------------------------------------------------------------


def encode(value):
  """A plain value as JSON: scalars and lists as they are, other values as {'kind': ...}; TypeError for other objects.

  Objects of NumPy become the values of `tolist`. Objects of subclasses become those of the plain class.
  """
  if value is None or value is True or value is False:
    return value
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, int):
    value = int(value)
    return value if -_SMALL < value < _SMALL else {'int': hex(value)}
  if isinstance(value, float):
    return float(value)
  if isinstance(value, complex):
    return {'complex': [value.real, value.imag]}
  if isinstance(value, bytes):
    return {'bytes': value.hex()}
  if isinstance(value, list):
    return [encode(x) for x in value]
  for kind in (tuple, set, frozenset):
    if isinstance(value, kind):
      return {kind.__name__: [encode(x) for x in value]}
  if isinstance(value, dict):
    return {'dict': [[encode(k), encode(v)] for k, v in value.items()]}
  if type(value).__module__ == 'numpy' and hasattr(value, 'tolist'):
    return encode(value.tolist())
  raise TypeError('a value of type ' + type(value).__name__ + ' is not plain')


def decode(value):
  """The value that `encode` wrote; ValueError, TypeError or RecursionError for anything else."""
  if isinstance(value, list):
    return [decode(x) for x in value]
  if not isinstance(value, dict):
    return value
  if len(value) != 1:
    raise ValueError('not an encoded value')
  ((kind, inner),) = value.items()
  if kind == 'int':
    return int(inner, 16)
  if kind == 'complex':
    return complex(*inner)
  if kind == 'bytes':
    return bytes.fromhex(inner)
  if kind == 'dict':
    return {decode(k): decode(v) for k, v in inner}
  if kind in ('tuple', 'set', 'frozenset'):
    return getattr(builtins, kind)(decode(x) for x in inner)
  raise ValueError('not an encoded value')


class _Lines:
  """The two pipes of the process. What code prints goes elsewhere, and it reads nothing."""

  def __init__(self):
    self._source, self._target = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    self._dumps, self._loads = json.dumps, json.loads

  def read(self):
    line = self._source.readline()
    return self._loads(line) if line else None

  def write(self, message):
    self._target.write(self._dumps(message).encode() + b'\n')
    self._target.flush()


# -- the side of the program -------------------------------------------------------------------------------------------


def serve():
  """Runs program.py after preamble.py, and then calls its functions as asked."""
  lines = _Lines()
  module = types.ModuleType('program')
  sys.modules['program'] = module  # where dataclasses look for their module
  for name in ('preamble.py', 'program.py'):
    with open('/program/' + name, 'rb') as f:
      exec(compile(f.read(), name, 'exec'), module.__dict__)
  while True:
    request = lines.read()
    if request is None:
      return
    lines.write({'id': request['id'], **_call(module, request)})


def _call(module, request):
  try:
    function = _find(module, request['name'])
    result = function(*decode(request['args']), **decode(request.get('kwargs', {'dict': []})))
  except BaseException as e:  # noqa: BLE001 a program may raise anything
    traceback.print_exc()
    return {'raised': type(e).__name__, 'message': str(e)[:500]}
  try:
    return {'value': encode(result)}
  except BaseException:  # noqa: BLE001 objects of the program may raise anything
    return {'unreadable': type(result).__name__}


def _find(module, name):
  """A function of the program, or a method of a new object of its class Solution, as on judging sites."""
  solution = getattr(module, 'Solution', None)
  if isinstance(solution, type) and hasattr(solution, name):
    return getattr(solution(), name)
  return getattr(module, name)


# -- the side of the assertions ----------------------------------------------------------------------------------------


class ProgramError(Exception):
  """The program raised an exception that is not passed on as it is, or returned an object that is not plain."""


# They would end a loop of the assertions, which is no failure there; or they take other arguments.
_NOT_PASSED = (StopIteration, StopAsyncIteration, UnicodeError)


def judge():
  """Runs the assertions of assertions.json; the functions that they call are those of the program."""
  lines = _Lines()
  with open('/program/assertions.json', 'rb') as f:
    task = json.load(f)
  namespace = {'__name__': 'assertions'}
  exec(compile(task['preamble'], 'preamble.py', 'exec'), namespace)
  for name in missing(task, namespace):
    namespace[name] = _remote(lines, name)
  exec(compile(task['setup'], 'setup.py', 'exec'), namespace)
  for statement in task['statements']:
    passed = True
    try:
      exec(compile(statement, 'assertion.py', 'exec'), namespace)
    except BaseException:  # noqa: BLE001 assertions may raise anything
      traceback.print_exc()
      passed = False
    lines.write({'passed': passed})


def missing(task, namespace):
  """The functions of the program: the one that is asked for, and names that are defined nowhere else."""
  used, bound = set(), set()
  for statement in [task['setup'], *task['statements']]:
    for node in ast.walk(ast.parse(statement)):
      if isinstance(node, ast.Name):
        (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
      elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        bound.add(node.name)
      elif isinstance(node, ast.arg):
        bound.add(node.arg)
      elif isinstance(node, ast.alias):
        bound.add((node.asname or node.name).partition('.')[0])
      elif isinstance(node, ast.ExceptHandler) and node.name:
        bound.add(node.name)
  known = bound | set(namespace) | set(dir(builtins))
  return {name for name in used if name not in known} | ({task['function']} - {''})


def _remote(lines, name):
  def call(*args, **kwargs):
    lines.write({'name': name, 'args': encode(list(args)), 'kwargs': encode(kwargs)})
    reply = lines.read()
    if reply is None:
      raise SystemExit
    if 'value' in reply:
      return decode(reply['value'])
    kind = getattr(builtins, str(reply.get('raised')), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _NOT_PASSED):
      kind = ProgramError
    raise kind(str(reply.get('message')))

  call.__name__ = name
  return call


if __name__ == '__main__':
  serve() if sys.argv[1] == 'serve' else judge()
