"""The user's own drawings as targets: SVG files of a folder, or a field of the rows of a data file."""

from __future__ import annotations

import functools
import glob
import logging
import os
import pathlib
from collections.abc import Iterator

from ragen_jax.envs.dataset import sources
from ragen_jax.envs.dataset.selection import is_held_out
from ragen_jax.envs.svg.program import MOST_CHARS, find_program
from ragen_jax.envs.svg.targets import Target, identity, is_drawn
from ragen_jax.envs.svg.values import ProgramError
from ragen_jax.utils.errors import one_line, short

_log = logging.getLogger(__name__)

BAD_DRAWINGS = ('drop', 'refuse')
MOST_DRAWINGS = 50_000
_LARGEST_FILE = 4 * MOST_CHARS  # bytes


@functools.lru_cache(maxsize=16)
def load_drawings(
  path: str, field: str, bad_drawings: str, split: str, test_share: float, side: int, stamp: tuple
) -> tuple[Target, ...]:
  """The drawings of a part of a source, each distinct picture once, in the order of paths or rows.

  Args:
    path: a folder of .svg files and those below it, one such file, a pattern, or a file of rows
      (`sources.ENDINGS`).
    field: of a row, with the text of the drawing.
    bad_drawings: 'drop' drawings that cannot be drawn here and log their number, or 'refuse' the source.
    side: pixels of a side of the pictures that are played; a drawing that is all white there is one of them.
    stamp: what changes when the source does, see `stamp_of`.

  Raises:
    ValueError: nothing can be read, or is in the part; one line names the source and the place.
  """
  del stamp
  found: dict[str, Target] = {}
  dropped, last, count = 0, '', 0
  for place, text in _texts(path, field):
    count += 1
    if count > MOST_DRAWINGS:
      raise ValueError(f'svg: path={path!r}: has more than {MOST_DRAWINGS:,} drawings')
    try:
      target = _read(text, side)
    except ProgramError as e:
      if bad_drawings == 'refuse':
        raise ValueError(f'{place}: {one_line(e, str)}') from e
      dropped, last = dropped + 1, f'{place}: {one_line(e, str)}'
      continue
    found.setdefault(target.id, target)
  if dropped:
    _log.warning('svg: path=%r: %d of %d drawings are left out; the last: %s', path, dropped, count, last)
  wanted = {'all': (False, True), 'train': (False,), 'test': (True,)}[split]
  part = tuple(target for target in found.values() if is_held_out(target.id, test_share) in wanted)
  if not part:
    reason = f'; the last that was left out: {last}' if dropped else ''
    raise ValueError(
      f'svg: path={path!r}: none of {count} drawings is in the part split={split!r} with test_share={test_share}'
      + reason
    )
  return part


def stamp_of(path: str) -> tuple:
  """Sizes and times of change of the files of a source; ValueError if there are none."""
  if _is_of_rows(path):
    found = [sources.check_file(os.path.expanduser(path), 'svg')]
  else:
    found = [os.stat(file) for file in _files(path)]
  return tuple((status.st_size, status.st_mtime_ns) for status in found)


def _is_of_rows(path: str) -> bool:
  return pathlib.Path(path).suffix.lower() in sources.ENDINGS


def _files(path: str) -> list[str]:
  given = os.path.expanduser(path)
  pattern = f'{glob.escape(given)}/**/*.svg' if os.path.isdir(given) else given
  found = sorted(file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file))
  others = [file for file in found if not file.lower().endswith('.svg')]
  if others or not 1 <= len(found) <= MOST_DRAWINGS:
    told = repr(others[0]) if others else f'{len(found):,} .svg files'
    raise ValueError(
      f'svg: path={path!r}: {told}; allowed: from 1 to {MOST_DRAWINGS:,} .svg files of a folder or a pattern, or a '
      f'file of rows that ends in {", ".join(sources.ENDINGS)}'
    )
  return found


def _texts(path: str, field: str) -> Iterator[tuple[str, str]]:
  """The places and texts of all drawings."""
  if _is_of_rows(path):
    for place, row in sources.read_files((os.path.expanduser(path),), 'svg'):
      if not isinstance(row.get(field), str):
        allowed = f'text; the row has the fields {", ".join(map(str, row))}'
        raise ValueError(f'{place}: field={field!r} is {short(row.get(field))}; allowed: {allowed}')
      yield place, row[field]
    return
  for file in _files(path):
    place = f'svg: path={file!r}'
    try:
      with open(file, 'rb') as opened:
        raw = opened.read(_LARGEST_FILE + 1)
    except OSError as e:
      raise ValueError(f'{place}: cannot be read ({e.strerror})') from e
    yield place, raw.decode('utf-8', 'replace')  # what is too long is refused by its characters


def _read(text: str, side: int) -> Target:
  """The drawing in a text; ProgramError if there is none, or nothing is drawn in a picture of `side` pixels."""
  program = find_program(text)
  if program is None:
    raise ProgramError('has no <svg> ... </svg>')
  program = program.replace('\r\n', '\n')
  if not is_drawn(program, side):
    raise ProgramError(f'draws nothing on white at {side} x {side} pixels')
  return Target(program, identity(program))
