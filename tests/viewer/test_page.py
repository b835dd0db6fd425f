"""The page of a run's episodes: what is in it, and what cannot be shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys

import pytest

from ragen_jax.config import command_line
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer import page as view
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from tests.support.made_up_episodes import episode_record, write_run
from tests.support.paths import ROOT


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A workdir with its page."""
  workdir = tmp_path_factory.mktemp('run') / 'lake & <co>'
  workdir.mkdir()
  write_run(workdir, attacks=True)
  view.view(str(workdir))
  return workdir


def _data(page):
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_lists_every_episode_once_with_its_first_board(run):
  data = _data((run / view.PAGE).read_text())
  records = [(file, record) for file in read_episodes(run) for record in file.records()]
  assert len(data['episodes']) == len(records) == 1000
  for entry, (file, record) in zip(data['episodes'], records, strict=True):
    assert {name: entry[name] for name in ('step', 'tag', 'level', 'member', 'status', 'score')} == {
      name: record[name] for name in ('step', 'tag', 'level', 'member', 'status', 'score')
    }
    assert data['pictures'][entry['picture']] == file.pictures[record['turns'][0]['picture']]
  assert len(set(data['pictures'])) == len(data['pictures']) <= 20


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(run):
  page = (run / view.PAGE).read_text()
  markup = re.sub(r'<script.*?</script>', '', page, flags=re.DOTALL)
  assert not re.search(r'https?:|//\w|url\(|@import|src=', markup)
  scripts = re.findall(r'<script>(.*?)</script>', page, re.DOTALL)
  assert len(scripts) == 1 and 'innerHTML' not in scripts[0]
  digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
  policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
  assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy
  assert page.count('</script>') == 2 + len(list(read_episodes(run)))


def test_the_page_is_the_same_again(run):
  before = (run / view.PAGE).read_bytes()
  view.write_page(run)
  assert (run / view.PAGE).read_bytes() == before
  assert not list(run.glob('*.tmp'))


def test_the_mode_writes_the_page_and_names_it(tmp_path):
  EpisodeWriter(tmp_path).write('eval', 0, [episode_record()])
  command = [sys.executable, 'main.py', '--mode=view', f'--workdir={tmp_path}']
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert result.stderr.startswith(f'{tmp_path / "trajectories.html"} (0.') and result.stderr.count('\n') == 1
  assert len(_data((tmp_path / view.PAGE).read_text())['episodes']) == 1


def test_what_cannot_be_shown_is_told_in_one_line(tmp_path):
  assert view.write_page(tmp_path) is None and not list(tmp_path.iterdir())
  for workdir, message in ((tmp_path, 'has no episodes'), (tmp_path / 'none', 'no such directory')):
    with pytest.raises(UserError, match=f'--workdir={workdir}: .*{message}') as e:
      view.view(str(workdir))
    assert '\n' not in str(e.value)


def test_a_config_is_needed_only_where_it_names_the_workdir():
  for arguments, message in (
    (['--workdir=x', '--config.seed=1'], r'--config\.seed=1 has no effect with --mode=view'),
    ([], '--config=FILE is missing'),
  ):
    with pytest.raises(UserError, match=message):
      command_line.parse(['main.py', '--mode=view', *arguments])
