"""A run's episodes as one web page that needs no network: each turn by turn, or a level over the steps."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import logging
import os
import pathlib
import re
from typing import Any

from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.store import read_episodes

_log = logging.getLogger(__name__)

PAGE = 'trajectories.html'
# Nothing runs but the page's own script, and nothing is fetched, whatever a policy has written.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'"


def view(workdir: str) -> str:
  """Writes the page of a run and tells where it is, for `--mode=view`.

  Args:
    workdir: the run's directory; a run may be going on in it.

  Returns:
    The page's path.

  Raises:
    UserError: there are no episodes in the directory, or the page cannot be written.
  """
  if not os.path.isdir(workdir):
    raise UserError(f'--workdir={workdir}: there is no such directory')
  page = write_page(workdir)
  if page is None:
    raise UserError(f'--workdir={workdir}: has no episodes; a run keeps some where config.logging.episodes is above 0')
  _log.info('%s (%.1f MB): open it in a browser', page, os.path.getsize(page) / 1e6)
  return page


def write_page(workdir: str | os.PathLike[str]) -> str | None:
  """Writes `<workdir>/trajectories.html`, in place of the one that may be there.

  Returns:
    Its path; None where there are no episodes to show.

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
      place = {'file': len(files), 'line': line, 'picture': None if first is None else numbers[first]}
      episodes.append(summary | place)
    files.append({'pictures': numbers})
    details.append(base64.b64encode(file.details).decode())
  if not episodes:
    return None
  path = pathlib.Path(workdir) / PAGE
  data = {'run': pathlib.Path(workdir).resolve().name, 'episodes': episodes, 'files': files, 'pictures': [*pictures]}
  temporary = path.with_name(f'{PAGE}.tmp')
  try:
    temporary.write_text(_page(data, details), encoding='utf-8')
    os.replace(temporary, path)
  except OSError as e:
    raise UserError(f'{path} was not written: {e.strerror or e}') from e
  return str(path)


def _page(data: dict[str, Any], details: list[str]) -> str:
  """The template with the data in it."""
  template = importlib.resources.files('ragen_jax.viewer').joinpath('page.html').read_text(encoding='utf-8')
  script = re.search(r'<script>(.*?)</script>', template, re.DOTALL)[1]
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  blobs = ''.join(f'<script type="text/plain" id="file-{i}">{blob}</script>\n' for i, blob in enumerate(details))
  # In JSON a '<' is only ever part of a string, where it may be written so that it ends no element.
  index = json.dumps(data, ensure_ascii=True, separators=(',', ':')).replace('<', '\\u003c')
  blanks = {'{{policy}}': _POLICY.format(digest), '{{data}}': index, '{{details}}': blobs}
  return re.sub(r'\{\{(policy|data|details)\}\}', lambda m: blanks[m[0]], template)
