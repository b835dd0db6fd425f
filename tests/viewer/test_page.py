"""The page of a run's episodes: what is in it, and what cannot be shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from ragen_jax.viewer.page import PAGE, write_page
from ragen_jax.viewer.store import read_episodes


def _data(page):
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_lists_every_episode_once_with_its_first_board(run):
  data = _data((run / PAGE).read_text())
  records = [(file, record) for file in read_episodes(run) for record in file.records()]
  assert len(data['episodes']) == len(records) == 1000
  for entry, (file, record) in zip(data['episodes'], records, strict=True):
    assert {name: entry[name] for name in ('step', 'tag', 'level', 'member', 'status', 'score')} == {
      name: record[name] for name in ('step', 'tag', 'level', 'member', 'status', 'score')
    }
    assert data['pictures'][entry['picture']] == file.pictures[record['turns'][0]['picture']]
  assert len(set(data['pictures'])) == len(data['pictures']) <= 20


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(run):
  page = (run / PAGE).read_text()
  markup = re.sub(r'<script.*?</script>', '', page, flags=re.DOTALL)
  assert not re.search(r'https?:|//\w|url\(|@import|src=', markup)
  scripts = re.findall(r'<script>(.*?)</script>', page, re.DOTALL)
  assert len(scripts) == 1 and 'innerHTML' not in scripts[0]
  digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
  policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
  assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy
  assert page.count('</script>') == 2 + len(list(read_episodes(run)))


def test_the_page_is_the_same_again(run):
  before = (run / PAGE).read_bytes()
  write_page(run)
  assert (run / PAGE).read_bytes() == before
  assert not list(run.glob('*.tmp'))
