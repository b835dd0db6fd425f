"""The page of a run's episodes: what is in it, and what cannot be shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from ragen_jax.viewer.page import PAGE, choose_steps, write_page
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from tests.support.made_up_episodes import episode_record


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


def test_a_page_with_room_has_every_step():
  assert choose_steps({}, 10) == [] and choose_steps({3: 100}, 10) == [3]
  assert choose_steps({1: 2, 5: 3, 6: 5}, 10) == [1, 5, 6]


def test_a_page_without_room_has_the_newest_the_first_and_some_steps_between():
  sizes = dict.fromkeys(range(100), 10)
  assert choose_steps(sizes, 200) == [*range(0, 96, 8), 95, 96, 97, 98, 99]  # a quarter of 200 for the newest
  assert choose_steps(sizes, 20) == [0, 99]
  assert choose_steps(sizes, 10) == choose_steps(sizes, 0) == [99]
  # As a run goes on, most steps stay on the page, and the sum stays below the limit.
  before: set[int] = set()
  for count in range(1, 300):
    now = choose_steps(dict.fromkeys(range(count), 10), 200)
    assert 10 * len(now) <= 200 and {0, count - 1} <= set(now)
    between = {step for step in now if step < count - 5}
    assert between <= before or not before or between >= before
    before = between


def test_steps_of_any_size_stay_below_the_limit():
  sizes = {step: 1 + 37 * step % 101 for step in range(0, 5000, 5)}
  for limit in (150, 1000, 10_000):
    chosen = choose_steps(sizes, limit)
    assert sum(sizes[step] for step in chosen) <= limit and {0, 4995} <= set(chosen)


def test_a_page_without_room_reads_and_shows_some_steps_and_tells_it(tmp_path, caplog):
  writer = EpisodeWriter(tmp_path)
  for step in range(20):
    for kind in ('train', 'eval'):
      writer.write(kind, step, [episode_record(step=step, split='train' if kind == 'train' else 'val')])
  paths = sorted((tmp_path / 'episodes').iterdir())
  limit = sum(path.stat().st_size for path in paths) * 4 // 3 // 2
  shown = {0, 4, 8, 12, 16, 18, 19}
  for path in paths:
    if int(path.name[-17:-9]) not in shown:
      path.write_bytes(b'?' * path.stat().st_size)
  page = (tmp_path / PAGE) if write_page(tmp_path, max_bytes=limit) else None
  data = _data(page.read_text())
  assert {(e['step'], e['split']) for e in data['episodes']} == {(s, k) for s in shown for k in ('train', 'val')}
  assert data['partial'] == {'steps': 7, 'of': 20} and not caplog.records
  write_page(tmp_path, max_bytes=None)
  assert len(caplog.records) == 26 and 'partial' not in _data(page.read_text())
