"""`--mode=view`: the page of a run, and what cannot be shown."""

from __future__ import annotations

import json
import random
import re

import pytest

from ragen_jax.config import command_line
from ragen_jax.modes import view
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.page import MAX_BYTES, PAGE, write_page
from ragen_jax.viewer.store import EpisodeWriter
from tests.support.made_up_episodes import episode_record
from tests.support.processes import copy_main


def test_the_mode_writes_the_page_and_names_it(tmp_path):
  EpisodeWriter(tmp_path).write('eval', 0, [episode_record()])
  result = copy_main('--mode=view', f'--workdir={tmp_path}', check=True)
  assert result.stderr.startswith(f'{tmp_path / "trajectories.html"} (0.') and result.stderr.count('\n') == 1
  data = re.search(r'id="data">(.*?)</script>', (tmp_path / PAGE).read_text(), re.DOTALL)[1]
  listed = json.loads(data)['episodes']
  assert len(listed) == 1


def test_the_mode_shows_all_steps_where_the_page_of_a_run_shows_some(tmp_path):
  EpisodeWriter(tmp_path).write('eval', 0, [episode_record()])
  (path,) = (tmp_path / 'episodes').iterdir()
  content = path.read_bytes()
  filler = random.Random(0).randbytes(4_000_000)  # the page carries the texts as they are
  for step in range(12):
    (path.parent / f'eval-{step:08d}.jsonl.gz').write_bytes(content + filler)
  write_page(tmp_path)
  page = tmp_path / PAGE
  assert page.stat().st_size < 1.1 * MAX_BYTES and '"partial":{"steps":' in page.read_text()
  view.view(str(tmp_path))
  assert page.stat().st_size > 12 * 5_000_000 and '"partial":{"steps":' not in page.read_text()


def test_what_cannot_be_shown_is_told_in_one_line(tmp_path):
  assert write_page(tmp_path) is None and not list(tmp_path.iterdir())
  for workdir, message in ((tmp_path, 'has no episodes'), (tmp_path / 'none', 'no such directory')):
    with pytest.raises(UserError, match=f'--workdir={workdir}: .*{message}') as e:
      view.view(str(workdir))
    assert '\n' not in str(e.value)


def test_a_config_is_needed_only_where_it_names_the_workdir():
  for arguments, message in (
    (['--workdir=x', '--config.seed=1'], r'--config\.seed=1 has no effect with --mode=view'),
    ([], r'^--mode=view: --workdir=DIR is missing, the directory of a run$'),
  ):
    with pytest.raises(UserError, match=message):
      command_line.parse(['main.py', '--mode=view', *arguments])
