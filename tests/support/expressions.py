"""A stand-in for the processes of the verifier 'math': it compares sums of letters, and can fail."""

from __future__ import annotations

from ragen_jax.utils.threads import Fault


class Sums:
  """Reads 'a+b' as the multiset of its letters; remembers what it was asked, and whether it was closed."""

  def __init__(self):
    self.asked, self.closed = [], False

  def map(self, method, arguments, *, timeout_s):
    self.asked += [(method, *x, timeout_s) for x in arguments]
    return [self._call(method, *x) for x in arguments]

  def _call(self, method, gold, answer=''):
    if 'hang' in answer or 'hang' in gold:
      return None, Fault('is_equal took longer than 1 s', hung=True)
    if 'unreadable' in gold:
      return (False if method == 'can_read' else None), None
    return (True if method == 'can_read' else sorted(gold.split('+')) == sorted(answer.split('+'))), None

  def close(self):
    self.closed = True


class Broken(Sums):
  """Processes that cannot be started."""

  def map(self, method, arguments, *, timeout_s):
    raise OSError('no more\nprocesses')
