"""`--mode=view`: writes the page that shows the episodes of a run."""

from __future__ import annotations

import logging
import os

from ragen_jax.runs.staging import StagedWorkdir, address
from ragen_jax.runs.stores import is_address
from ragen_jax.runs.workdir import open_workdir
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.page import write_page

_log = logging.getLogger(__name__)


def view(workdir: str) -> str:
  """Writes the page of all episodes of a run, which may be in progress; logs and returns its path, or its address.

  Raises UserError if there are no episodes in the directory, or the page cannot be written.
  """
  if not is_address(workdir) and not os.path.isdir(workdir):
    raise UserError(f'--workdir={workdir}: there is no such directory')
  with open_workdir(workdir, write=False) as place:
    return _view(place)


def _view(workdir: str | StagedWorkdir) -> str:
  page = write_page(workdir, max_bytes=None)
  if page is None:
    raise UserError(f'--workdir={workdir}: has no episodes; a run keeps episodes if logging.episodes is above 0')
  shown = address(page, workdir)
  _log.info('%s (%.1f MB): open it in a browser', shown, os.path.getsize(page) / 1e6)
  return shown
