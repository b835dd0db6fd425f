"""Writes a run's episodes as one web page that needs no network: turn by turn, or one level over the steps."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
from typing import Any

from ragen_jax.utils.files import replace_file
from ragen_jax.viewer.store import read_episodes

PAGE = 'trajectories.html'
# Only the page's own script runs, and nothing is fetched, whatever a policy has written.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'"


def write_page(workdir: str | os.PathLike[str]) -> str | None:
  """Writes or replaces `<workdir>/trajectories.html`.

  Returns:
    The path of the page; None if there are no episodes.

  Raises:
    UserError: the disk is full or not writable.
  """
  pictures: dict[str, int] = {}
  episodes: list[dict[str, Any]] = []
  files, details = [], []
  for file in read_episodes(workdir):
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
  replace_file(path, _page(data, details))
  return str(path)


def _page(data: dict[str, Any], details: list[str]) -> str:
  """The template with its placeholders replaced."""
  template = importlib.resources.files('ragen_jax.viewer').joinpath('page.html').read_text(encoding='utf-8')
  script = re.search(r'<script>(.*?)</script>', template, re.DOTALL)[1]
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  blobs = ''.join(f'<script type="text/plain" id="file-{i}">{blob}</script>\n' for i, blob in enumerate(details))
  # '<' occurs only in strings of the JSON; escaped, it cannot end an element.
  index = json.dumps(data, ensure_ascii=True, separators=(',', ':')).replace('<', '\\u003c')
  values = {'{{policy}}': _POLICY.format(digest), '{{data}}': index, '{{details}}': blobs}
  return re.sub(r'\{\{(policy|data|details)\}\}', lambda m: values[m[0]], template)
