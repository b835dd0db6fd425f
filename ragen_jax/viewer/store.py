"""Episodes on disk: one file for each evaluation and each training iteration that keeps some.

  <workdir>/episodes/train-00000005.jsonl.gz    episodes of iteration 5
  <workdir>/episodes/eval-00000010.jsonl.gz     episodes of the evaluation after iteration 10

The first line of a file contains a summary of each episode, and every picture once. One line for each episode follows,
in the same order; `viewer.schema` defines the keys. The first line is a separate gzip member. Episodes can therefore be
listed without reading the rest, and the rest is copied unchanged into a web page (gunzip reads both members as one).

A run that was stopped and resumed has the same files as an uninterrupted run.
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
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ragen_jax.utils.errors import DiskError
from ragen_jax.utils.files import encode_png, replace_file
from ragen_jax.viewer.schema import SUMMARY_KEYS, EpisodeRecord

_log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r'(train|eval)-(\d+)\.jsonl\.gz(\.tmp)?')


class EpisodeWriter:
  """Writes the episodes of a run; it is enabled in the first process only."""

  def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0, enabled: bool = True):
    """Removes the files of `start_step` and later steps, whose episodes will be played again.

    If it is not enabled, every method does nothing. Raises DiskError if a file cannot be removed.
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
          raise DiskError(f'{path} was not removed: {e.strerror or e}') from e

  def write(self, kind: str, step: int, records: list[EpisodeRecord]) -> None:
    """Writes or replaces the file of a step, of the kind 'train' or 'eval'; without records no file is written.

    Raises DiskError if the disk is full or not writable.
    """
    if not self.enabled or not records:
      return
    path = self._directory / f'{kind}-{step:08d}.jsonl.gz'
    head, body = _encode(records)
    content = gzip.compress(head, 6, mtime=0) + gzip.compress(body, 6, mtime=0)
    replace_file(path, content, f'episodes were not written to {path}')


def _encode(records: list[EpisodeRecord]) -> tuple[bytes, bytes]:
  """The first line of a file, and the other lines."""
  pictures: dict[bytes, int] = {}

  def number(picture: np.ndarray | None) -> int | None:
    return None if picture is None else pictures.setdefault(encode_png(picture), len(pictures))

  summaries, lines = [], []
  for record in records:
    turns = [
      turn
      | {'picture': number(turn['picture'])}
      | ({'images': [number(image) for image in turn['images']]} if 'images' in turn else {})
      for turn in record['turns']
    ]
    last = number(record['final_picture'])
    first = turns[0]['picture'] if turns else last
    summary = {name: record[name] for name in SUMMARY_KEYS if name in record}
    summaries.append(summary | {'turns': len(turns), 'picture': first})
    rest = {name: x for name, x in record.items() if name not in SUMMARY_KEYS}
    lines.append(_line(rest | {'turns': turns, 'final_picture': last}))
  images = [base64.b64encode(png).decode() for png in pictures]
  return _line({'format': FORMAT, 'episodes': summaries, 'pictures': images}), b''.join(lines)


def _line(value: Any) -> bytes:
  return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':')).encode(errors='replace') + b'\n'


@dataclasses.dataclass(frozen=True)
class EpisodeFile:
  """A file of episodes.

  Attributes:
    episodes: a summary of each episode: an `EpisodeSummary` with the number of its `turns` and its first `picture`, an
      index or None.
    pictures: PNG files as base64.
    details: gzip of one JSON line for each episode, in the same order.
  """

  path: pathlib.Path
  episodes: list[dict[str, Any]]
  pictures: list[str]
  details: bytes

  def records(self) -> list[dict[str, Any]]:
    """The complete records; pictures are indices."""
    lines = gzip.decompress(self.details).decode().rstrip('\n').split('\n')
    return [summary | json.loads(line) for summary, line in zip(self.episodes, lines, strict=True)]


def episode_paths(workdir: str | os.PathLike[str]) -> list[tuple[int, pathlib.Path]]:
  """(step, path) of the files of a run, in the order of steps."""
  directory = pathlib.Path(workdir) / 'episodes'
  found = [(int(m[2]), path) for path in directory.glob('*') if (m := _NAME.fullmatch(path.name)) and not m[3]]
  return sorted(found)


def read_episodes(workdir: str | os.PathLike[str], steps: Collection[int] | None = None) -> Iterator[EpisodeFile]:
  """The files of a run in the order of steps, of all steps or of some.

  Files that cannot be read are skipped with a warning.
  """
  for step, path in episode_paths(workdir):
    if steps is not None and step not in steps:
      continue
    try:
      inflate = zlib.decompressobj(wbits=31)
      head = json.loads(inflate.decompress(path.read_bytes()))
      if head['format'] != FORMAT:
        raise ValueError(f'format {head["format"]}, not {FORMAT}')
      yield EpisodeFile(path, head['episodes'], head['pictures'], inflate.unused_data)
    except (OSError, zlib.error, ValueError, KeyError, TypeError) as e:
      _log.warning('%s is left out: %s', path, ' '.join(str(e).split()) or type(e).__name__)
