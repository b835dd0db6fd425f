"""A made-up run with its page of episodes."""

from __future__ import annotations

import pytest

from ragen_jax.viewer.page import write_page
from tests.support.made_up_episodes import write_run


@pytest.fixture(scope='session')
def run(tmp_path_factory):
  """A workdir with its page."""
  workdir = tmp_path_factory.mktemp('run') / 'lake & <co>'
  workdir.mkdir()
  write_run(workdir, attacks=True)
  write_page(workdir)
  return workdir
