"""Episodes come back from disk as they went, take little room, and a resumed run leaves each once."""

from __future__ import annotations

import base64
import gzip
import json
import pathlib

import numpy as np
import pytest

from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import encode_png
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from tests.support.made_up_episodes import episode_record


def _names(workdir: pathlib.Path) -> list[str]:
  return sorted(path.name for path in (workdir / 'episodes').iterdir())


def test_records_come_back(tmp_path):
  records = [episode_record(level=i, text=f'line\u2028one\nline two {i} 你') for i in range(3)]
  EpisodeWriter(tmp_path).write('eval', 7, records)
  (file,) = read_episodes(tmp_path)
  assert file.path == tmp_path / 'episodes' / 'eval-00000007.jsonl.gz'
  png = {base64.b64decode(picture): i for i, picture in enumerate(file.pictures)}
  for record, back in zip(records, file.records(), strict=True):
    for turn in [*record['turns'], record]:
      name = 'final_picture' if turn is record else 'picture'
      turn[name] = png[encode_png(turn[name])]
    assert back == record | {'picture': record['turns'][0]['picture']}
  # Any reader of gzip and JSON gets along with it.
  lines = gzip.decompress(file.path.read_bytes()).decode().rstrip('\n').split('\n')
  assert len(lines) == 4 and len(json.loads(lines[0])['episodes']) == 3
  assert [json.loads(line)['turns'] for line in lines[1:]] == [record['turns'] for record in records]


def test_text_that_is_no_unicode_is_written_all_the_same(tmp_path):
  EpisodeWriter(tmp_path).write('eval', 7, [episode_record(text='half a \udc80 sign')])
  (file,) = read_episodes(tmp_path)
  assert file.records()[0]['turns'][0]['pieces'][0] == 'half a ? sign'


def test_equal_pictures_are_kept_once(tmp_path):
  records = [episode_record(turns=4) for _ in range(50)]
  EpisodeWriter(tmp_path).write('train', 1, records)
  (file,) = read_episodes(tmp_path)
  different = {turn['picture'].tobytes() for r in records for turn in r['turns']} | {
    r['final_picture'].tobytes() for r in records
  }
  assert len(file.pictures) == len(different) <= 5


def test_an_environment_without_pictures(tmp_path):
  record = episode_record()
  record['final_picture'] = None
  for turn in record['turns']:
    turn['picture'] = None
  EpisodeWriter(tmp_path).write('eval', 0, [record])
  (file,) = read_episodes(tmp_path)
  assert file.pictures == [] and file.episodes[0]['picture'] is None and file.records()[0]['final_picture'] is None


def test_many_episodes_take_little_room(tmp_path):
  rng = np.random.default_rng(0)
  writer = EpisodeWriter(tmp_path)
  for step in range(4):
    writer.write('train', step, [episode_record(step=step, level=i, rng=rng, turns=5, tokens=40) for i in range(50)])
  size = sum(path.stat().st_size for path in (tmp_path / 'episodes').iterdir())
  # 200 sampled tokens an episode, each with four random numbers of four digits, which cannot be less than 7 bytes.
  assert size < 4 * 50 * 200 * 12


def test_a_resumed_run_writes_each_file_once(tmp_path):
  writer = EpisodeWriter(tmp_path)
  for step in range(4):
    writer.write('train', step, [episode_record(step=step)])
  writer.write('eval', 3, [episode_record(step=3)])
  (tmp_path / 'episodes' / 'train-00000001.jsonl.gz.tmp').write_bytes(b'half')
  before = (tmp_path / 'episodes' / 'train-00000002.jsonl.gz').read_bytes()
  resumed = EpisodeWriter(tmp_path, start_step=2)  # from the checkpoint of step 1
  assert _names(tmp_path) == ['train-00000000.jsonl.gz', 'train-00000001.jsonl.gz']
  for _ in range(2):
    resumed.write('train', 2, [episode_record(step=2)])
  assert _names(tmp_path)[2:] == ['train-00000002.jsonl.gz']
  assert (tmp_path / 'episodes' / 'train-00000002.jsonl.gz').read_bytes() == before


def test_files_come_in_the_order_of_steps(tmp_path):
  writer = EpisodeWriter(tmp_path)
  for kind, step in (('train', 10), ('eval', 2), ('train', 2), ('eval', 100_000_000)):
    writer.write(kind, step, [episode_record(step=step)])
  assert [file.episodes[0]['step'] for file in read_episodes(tmp_path)] == [2, 2, 10, 100_000_000]


def test_a_damaged_file_is_left_out_with_one_line(tmp_path, caplog):
  writer = EpisodeWriter(tmp_path)
  for step in range(4):
    writer.write('eval', step, [episode_record(step=step)])
  files = sorted((tmp_path / 'episodes').iterdir())
  files[0].write_bytes(b'no gzip')
  files[1].write_bytes(files[1].read_bytes()[:50])
  files[2].write_bytes(gzip.compress(b'{"format": 99}\n'))
  assert [file.episodes[0]['step'] for file in read_episodes(tmp_path)] == [3]
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == 3 and all('is left out' in m and '\n' not in m for m in messages)
  assert 'format 99, not 1' in messages[2]


def test_nothing_is_written_where_it_is_disabled_or_empty(tmp_path):
  EpisodeWriter(tmp_path, enabled=False).write('eval', 0, [episode_record()])
  EpisodeWriter(tmp_path).write('eval', 0, [])
  assert list(tmp_path.iterdir()) == [] and list(read_episodes(tmp_path)) == []


def test_a_disk_that_cannot_be_written_is_told_in_one_line(tmp_path):
  (tmp_path / 'episodes').write_text('in the way')
  with pytest.raises(UserError, match=r'eval-00000000\.jsonl\.gz') as e:
    EpisodeWriter(tmp_path).write('eval', 0, [episode_record()])
  assert '\n' not in str(e.value)
