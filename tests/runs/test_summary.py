"""The tables at the end of a run."""

from __future__ import annotations

import json

from ragen_jax.runs.summary import summarize


def test_success_before_and_after_and_the_times(tmp_path, capsys):
  first = {'val-env/success': 0.25, 'val-env/A/success': 0.25, 'val-env/A/optimal': 0.5, 'val-env/B/success': 0.1}
  last = first | {'val-env/A/success': 0.4, 'val-greedy/A/success': 0.45}
  rows = [
    {'step': 0, **first, 'val-greedy/A/success': 0.2, 'timing_s/testing': 2.0},
    {'step': 1, 'timing_s/gen': 6.0},
    {'step': 2, **last, 'timing_s/update_actor': 1.0, 'timing_s/testing': 1.0},
  ]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  assert summarize(str(tmp_path), ('A', 'B'), levels=8, group_size=4, page='a.html') == rows[2]
  assert capsys.readouterr().out.splitlines() == [
    '',
    'Success on 8 held-out levels, 32 episodes',
    '---------------------------------------------------------',
    '            before  after 2  best possible  share of best',
    '---------------------------------------------------------',
    'A, sampled  0.250   0.400    0.500          80%',
    'A, greedy   0.200   0.450    0.500          90%',
    'B, sampled  0.100   0.100    not known      -',
    'Time',
    '------------------------',
    'rollout      6.0 s   60%',
    'advantages   0.0 s   0%',
    'update       1.0 s   10%',
    'evaluation   3.0 s   30%',
    'checkpoints  0.0 s   0%',
    'all          10.0 s',
    f'Metrics, checkpoints and TensorBoard files: {tmp_path}',
    'Episodes, turn by turn, for a browser: a.html',
    f'tensorboard --logdir {tmp_path}/tb',
  ]


def test_a_run_whose_metrics_were_deleted_has_no_table_of_success(tmp_path, capsys, caplog):
  (tmp_path / 'metrics.jsonl').write_text('')
  assert summarize(str(tmp_path), ('A',), levels=8, group_size=4) == {}
  out = capsys.readouterr().out
  assert 'Success' not in out and 'all          0.0 s' in out and f'TensorBoard files: {tmp_path}' in out
  (warning,) = caplog.messages
  assert warning.startswith(f'{tmp_path}/metrics.jsonl has no evaluation, so it was deleted') and '\n' not in warning


def test_a_run_whose_first_metrics_were_deleted_does_not_show_a_later_evaluation_as_the_first(tmp_path, capsys):
  last = {'step': 4, 'val-env/success': 0.4, 'val-env/A/success': 0.4, 'val-env/A/optimal': 0.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps({'step': 3}) + '\n' + json.dumps(last) + '\n')
  assert summarize(str(tmp_path), ('A',), levels=8, group_size=4) == last
  assert 'A, sampled  -       0.400    0.500          80%' in capsys.readouterr().out
