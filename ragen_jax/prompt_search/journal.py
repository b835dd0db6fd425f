"""The journal of a search: a file with the results so far, which a search reads after an interruption."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ragen_jax.utils.errors import DiskError, UserError


class Journal:
  """Results by key: one JSON line each, behind a line that says what they depend on.

  A result is on the disk when `add` returns. A line that was half written when the process ended is dropped.
  """

  def __init__(self, path: str | os.PathLike[str], head: Mapping[str, Any]):
    """Opens or creates the file; the JSON values of `head` are what all results depend on, by name.

    Raises UserError if the file belongs to another head, is damaged, or cannot be read or written.
    """
    self.path = pathlib.Path(path)
    self._results: dict[str, Any] = {}
    head = json.loads(json.dumps(head))
    lines = self._read()
    if not lines:
      self._append(head)
      return
    if not isinstance(lines[0], dict) or any(not isinstance(line, list) or len(line) != 2 for line in lines[1:]):
      raise DiskError(f'{self.path} was not written by this program; move it away or choose another --workdir')
    changed = [name for name in sorted({*head, *lines[0]}) if head.get(name) != lines[0].get(name)]
    if changed:
      told = '; '.join(f'{n} was {_short(lines[0].get(n))} and is {_short(head.get(n))}' for n in changed)
      raise UserError(f'{self.path} belongs to another search: {told}; choose another --workdir or set these back')
    self._results = dict(lines[1:])

  def find(self, key: str) -> Any:
    """The result of a key; None if there is none."""
    return self._results.get(key)

  def add(self, key: str, result: Any) -> None:
    """Stores a result. Raises ValueError if its key has one, UserError if the disk is full or not writable."""
    if key in self._results:
      raise ValueError(f'{key} has a result')
    self._append([key, result])
    self._results[key] = result

  def _read(self) -> list[Any]:
    """The complete lines; a rest that was half written is cut off."""
    if not self.path.exists():
      return []
    try:
      content = self.path.read_bytes()
      whole, _, rest = content.rpartition(b'\n')
      if rest:
        os.truncate(self.path, len(content) - len(rest))
    except OSError as e:
      raise UserError(f'{self.path} cannot be used: {e.strerror or e}') from e
    try:
      return [json.loads(line) for line in whole.split(b'\n') if line]
    except ValueError as e:
      raise UserError(f'{self.path} is damaged ({e}); move it away or choose another --workdir') from e

  def _append(self, line: Any) -> None:
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      with self.path.open('ab') as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b'\n')
        file.flush()
        os.fsync(file.fileno())
    except OSError as e:
      raise DiskError(f'{self.path} was not written: {e.strerror or e}') from e


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 80 else text[:77] + '...'
