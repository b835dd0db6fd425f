"""Episodes on disk: one file for each evaluation and each training iteration that keeps some.

  <workdir>/episodes/train-00000005.jsonl.gz    the episodes that iteration 5 sampled
  <workdir>/episodes/eval-00000010.jsonl.gz     those of the evaluation after iteration 10

The first line of a file has a short summary of each episode, and the pictures, each once; then comes a line for each
episode, in the same order. The first line is a gzip member of its own: a list of all episodes is made without reading
the rest, and the rest goes into a web page as it is (gunzip reads both as one).

A run that is stopped and resumed leaves the files of the run that was never stopped.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import encode_png

_log = logging.getLogger(__name__)

FORMAT = 1
# Fields of a record that the first line has; the others are in its own line.
SUMMARY = (
  'step', 'split', 'tag', 'level', 'group', 'member', 'status', 'score', 'actions', 'error', 'learnt',
  'prompts_trained',
)  # fmt: skip
_NAME = re.compile(r'(train|eval)-(\d+)\.jsonl\.gz(\.tmp)?')


class EpisodeWriter:
  """Writes the episodes of a run; one process of a run has one, the others have it disabled.

  Attributes:
    workdir: the run's directory.
    enabled: something is written.
  """

  def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0, enabled: bool = True):
    """Forgets the episodes of `start_step` and later steps, which will be played again.

    Args:
      workdir: the run's directory.
      start_step: the first step that will be written.
      enabled: False makes every method do nothing.

    Raises:
      UserError: a file cannot be removed.
    """
    self.workdir, self.enabled = workdir, enabled
    self._directory = pathlib.Path(workdir) / 'episodes'
    if not enabled or not self._directory.is_dir():
      return
    for path in self._directory.iterdir():
      match = _NAME.fullmatch(path.name)
      if match and (int(match[2]) >= start_step or match[3]):
        try:
          path.unlink(missing_ok=True)
        except OSError as e:
          raise UserError(f'{path} was not removed: {e.strerror or e}') from e

  def write(self, kind: str, step: int, records: list[dict[str, Any]]) -> None:
    """Writes the file of a step, in place of the one that may be there; none where there are no records.

    Args:
      kind: 'train' or 'eval'.
      step: the iteration.
      records: as `agent.record.episode_records` gives them.

    Raises:
      UserError: the disk is full or not writable.
    """
    if not self.enabled or not records:
      return
    path = self._directory / f'{kind}-{step:08d}.jsonl.gz'
    temporary = path.with_name(path.name + '.tmp')
    head, body = _encode(records)
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      temporary.write_bytes(gzip.compress(head, 6, mtime=0) + gzip.compress(body, 6, mtime=0))
      os.replace(temporary, path)
    except OSError as e:
      raise UserError(f'episodes were not written to {path}: {e.strerror or e}') from e


def _encode(records: list[dict[str, Any]]) -> tuple[bytes, bytes]:
  """The file's first line, and the others."""
  pictures: dict[bytes, int] = {}

  def number(picture: np.ndarray | None) -> int | None:
    return None if picture is None else pictures.setdefault(encode_png(picture), len(pictures))

  summaries, lines = [], []
  for record in records:
    turns = [turn | {'picture': number(turn['picture'])} for turn in record['turns']]
    last = number(record['final_picture'])
    first = turns[0]['picture'] if turns else last
    summary = {name: record[name] for name in SUMMARY if name in record}
    summaries.append(summary | {'turns': len(turns), 'picture': first})
    rest = {name: x for name, x in record.items() if name not in SUMMARY}
    lines.append(_line(rest | {'turns': turns, 'final_picture': last}))
  images = [base64.b64encode(png).decode() for png in pictures]
  return _line({'format': FORMAT, 'episodes': summaries, 'pictures': images}), b''.join(lines)


def _line(value: Any) -> bytes:
  return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':')).encode(errors='replace') + b'\n'


@dataclasses.dataclass(frozen=True)
class EpisodeFile:
  """A file of episodes.

  Attributes:
    path: where it is.
    episodes: a summary of each: `SUMMARY`, the number of its turns, and the index of its first picture or None.
    pictures: PNG files as base64.
    details: a gzip of one JSON line an episode, in the same order.
  """

  path: pathlib.Path
  episodes: list[dict[str, Any]]
  pictures: list[str]
  details: bytes

  def records(self) -> list[dict[str, Any]]:
    """The episodes as a whole; pictures are indices."""
    lines = gzip.decompress(self.details).decode().rstrip('\n').split('\n')
    return [summary | json.loads(line) for summary, line in zip(self.episodes, lines, strict=True)]


def read_episodes(workdir: str | os.PathLike[str]) -> Iterator[EpisodeFile]:
  """The files of a run, by step; one that cannot be read is left out with a warning."""
  directory = pathlib.Path(workdir) / 'episodes'
  found = [(int(m[2]), path) for path in directory.glob('*') if (m := _NAME.fullmatch(path.name)) and not m[3]]
  for _, path in sorted(found):
    try:
      inflate = zlib.decompressobj(wbits=31)
      head = json.loads(inflate.decompress(path.read_bytes()))
      if head['format'] != FORMAT:
        raise ValueError(f'format {head["format"]}, not {FORMAT}')
      yield EpisodeFile(path, head['episodes'], head['pictures'], inflate.unused_data)
    except (OSError, zlib.error, ValueError, KeyError, TypeError) as e:
      _log.warning('%s is left out: %s', path, ' '.join(str(e).split()) or type(e).__name__)
