"""Writes a run's episodes as one web page that needs no network: turn by turn, or one level over the steps."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ragen_jax.utils.files import replace_file
from ragen_jax.viewer.store import episode_paths, read_episodes

PAGE = 'trajectories.html'
MAX_BYTES = 32_000_000  # of a page that is written again at each evaluation
# Only the page's own script runs, and nothing is fetched, whatever a policy has written.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'"


def write_page(workdir: str | os.PathLike[str], max_bytes: int | None = MAX_BYTES) -> str | None:
  """Writes or replaces `<workdir>/trajectories.html`; returns its path, or None if there are no episodes.

  Args:
    max_bytes: about the size of the page. If the episodes of a run need more, the page has those of some steps (see
      `choose_steps`) and tells how many; the files of other steps are not read. None: all episodes.

  Raises:
    UserError: the disk is full or not writable.
  """
  sizes = _sizes(workdir)
  steps = [*sizes] if max_bytes is None else choose_steps(sizes, max_bytes)
  pictures: dict[str, int] = {}
  episodes: list[dict[str, Any]] = []
  files, details = [], []
  for file in read_episodes(workdir, frozenset(steps)):
    numbers = [pictures.setdefault(png, len(pictures)) for png in file.pictures]
    for line, summary in enumerate(file.episodes):
      first = summary['picture']
      position = {'file': len(files), 'line': line, 'picture': None if first is None else numbers[first]}
      episodes.append(summary | position)
    files.append({'pictures': numbers})
    details.append(base64.b64encode(file.details).decode())
  if not episodes:
    return None
  path = pathlib.Path(workdir) / PAGE
  data = {'run': pathlib.Path(workdir).resolve().name, 'episodes': episodes, 'files': files, 'pictures': [*pictures]}
  if len(steps) < len(sizes):
    data['partial'] = {'steps': len(steps), 'of': len(sizes)}
  replace_file(path, _page(data, details), many_writers=True)  # a run, and --mode=view beside it
  return str(path)


def choose_steps(sizes: Mapping[int, int], max_bytes: int) -> list[int]:
  """The steps of a page that cannot hold all: the newest ones, the first one, and others at even distances; ascending.

  The newest steps take a quarter of the page. For the others, the page has every second step, or every fourth and so
  on; so most of them are also on the page of a later evaluation.

  Args:
    sizes: step -> bytes on the page, in the order of steps.
    max_bytes: the sum of sizes is at most this, unless the newest step, which is always chosen, needs more.
  """
  steps, room = list(sizes), max_bytes / 4
  newest = steps[-1:]
  room -= sum(sizes[step] for step in newest)
  for step in reversed(steps[:-1]):
    room -= sizes[step]
    if room < 0:
      break
    newest.append(step)
  distance = 1
  while distance < 2 * len(steps):
    chosen = {*steps[::distance], *newest}
    if sum(sizes[step] for step in chosen) <= max_bytes:
      return sorted(chosen)
    distance *= 2
  return sorted(newest)


def _sizes(workdir: str | os.PathLike[str]) -> dict[int, int]:
  """Step -> bytes of its files on a page, which has their contents in base64."""
  sizes: dict[int, int] = {}
  for step, path in episode_paths(workdir):
    with contextlib.suppress(OSError):
      sizes[step] = sizes.get(step, 0) + path.stat().st_size * 4 // 3
  return sizes


def _page(data: dict[str, Any], details: list[str]) -> str:
  template = importlib.resources.files('ragen_jax.viewer').joinpath('page.html').read_text(encoding='utf-8')
  script = re.search(r'<script>(.*?)</script>', template, re.DOTALL)[1]
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  blobs = ''.join(f'<script type="text/plain" id="file-{i}">{blob}</script>\n' for i, blob in enumerate(details))
  # '<' occurs only in strings of the JSON; escaped, it cannot end an element.
  index = json.dumps(data, ensure_ascii=True, separators=(',', ':')).replace('<', '\\u003c')
  values = {'{{policy}}': _POLICY.format(digest), '{{data}}': index, '{{details}}': blobs}
  return re.sub(r'\{\{(policy|data|details)\}\}', lambda m: values[m[0]], template)
