"""What a run writes of episodes and evaluations: metrics, TensorBoard, records for the viewer, and a line."""

from __future__ import annotations

import io
import types

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.evaluation.evaluator import Evaluation
from ragen_jax.runs.metrics import MetricWriter, read_metrics
from ragen_jax.runs.progress import Progress
from ragen_jax.training.run_log import BEST, LogSettings, RunLog, mean_success, success_by_tag, success_line
from ragen_jax.viewer.page import PAGE
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from tests.support.events import read_events
from tests.support.made_up_episodes import episode_record

_METRICS = {
  'val-env/A/success': 0.5,
  'val-greedy/A/success': 0.25,
  'val-env/A/optimal': 0.75,
  'val-env/B/success': 1.0,
}


def _episode(tag, number, *, drawn=True):
  picture = np.full((4, 4, 3), number, np.uint8) if drawn else None
  turn = Turn(f'board {number}', 'go', ['Up'], (1.0,), 0.0, True, 1, picture)
  return Episode(tag, 0, number, [turn], status=Status.SUCCESS, final_picture=picture)


def _log(tmp_path, *, enabled=True, trajectories=2, tracker=None):
  settings = LogSettings(trajectories=trajectories, train_tags=('A',), eval_tags=('A', 'B'), eval_group_size=2)
  stream = io.StringIO()
  writer = MetricWriter(tmp_path, tracker=tracker)
  log = RunLog(settings, writer, EpisodeWriter(tmp_path, enabled=enabled), Progress(9, stream=stream))
  return log, stream


def _tensorboard(tmp_path):
  """(texts, names of pictures) of all events, by name."""
  values = [value for event in read_events(tmp_path / 'tb') for value in event.summary.value]
  texts = {v.tag.removesuffix('/text_summary'): v.tensor.string_val[0].decode() for v in values if v.tensor.string_val}
  return texts, {v.tag for v in values if v.HasField('image')}


def test_an_evaluation_in_one_line():
  metrics = {
    'val-env/A/success': 0.5,
    'val-greedy/A/success': 0.25,
    'val-env/A/optimal': 0.75,
    'val-env/B/success': 1.0,
  }
  assert success_line(metrics, ('A', 'B')) == 'A 0.500 sampled, 0.250 greedy, 0.750 best possible; B 1.000 sampled'


def test_the_success_of_an_evaluation_is_the_mean_over_tags():
  assert success_by_tag(_METRICS, ('B', 'A')) == {'B': 1.0, 'A': 0.5}
  assert mean_success(_METRICS, ('A', 'B')) == 0.75 and mean_success(_METRICS, ('A',)) == 0.5
  with pytest.raises(KeyError):
    mean_success(_METRICS, ('A', 'C'))


def test_an_evaluation_is_written_everywhere(tmp_path):
  files = []
  log, stream = _log(tmp_path, tracker=types.SimpleNamespace(file=files.append, scalars=None))
  episodes = [_episode('A', i) for i in range(6)] + [_episode('B', 10 + i, drawn=i > 1) for i in range(4)]
  records = [episode_record(step=3, tag=tag) for tag in ('A', 'B')]
  assert log.evaluation(3, Evaluation(_METRICS, episodes, records)) == 0.75
  log.metrics.flush()
  (line,) = read_metrics(tmp_path)
  assert line == {'step': 3, BEST: 0.75} | _METRICS
  (file,) = read_episodes(tmp_path)
  assert (file.path.name, len(file.records())) == ('eval-00000003.jsonl.gz', 2)
  assert (tmp_path / PAGE).is_file() and files == [str(tmp_path / PAGE)]
  assert f'held-out success after 3: {success_line(_METRICS, ("A", "B"))}' in stream.getvalue()
  # One episode a level of the first two levels of each tag; boards where they were drawn.
  texts, pictures = _tensorboard(tmp_path)
  assert [texts[f'val/generations/{i}'].split(':')[0] for i in range(4)] == [
    '**A**, level 0', '**A**, level 2', '**B**, level 10', '**B**, level 12'
  ]  # fmt: skip
  assert len(texts) == 4 and pictures == {'val/boards/0', 'val/boards/1', 'val/boards/3'}


def test_episodes_of_training_are_written_with_their_records(tmp_path):
  log, _ = _log(tmp_path, trajectories=3)
  episodes = [_episode('A', i) for i in range(5)]
  log.training_episodes(4, episodes, [episode_record(split='train', step=4, member=i) for i in range(5)])
  log.metrics.flush()
  (file,) = read_episodes(tmp_path)
  assert (file.path.name, len(file.records())) == ('train-00000004.jsonl.gz', 5)
  texts, pictures = _tensorboard(tmp_path)
  assert sorted(texts) == [f'train/generations/{i}' for i in range(3)] and len(pictures) == 3
  assert not (tmp_path / PAGE).exists()  # it is written behind an evaluation


def test_a_process_that_writes_no_episodes_writes_no_page_of_another_s(tmp_path):
  EpisodeWriter(tmp_path).write('eval', 0, [episode_record()])
  log, _ = _log(tmp_path, enabled=False)
  log.evaluation(3, Evaluation(_METRICS, [_episode('A', 0)], [episode_record()]))
  log.metrics.flush()
  assert len(list(read_episodes(tmp_path))) == 1 and not (tmp_path / PAGE).exists()
  assert read_metrics(tmp_path)[0][BEST] == 0.75
