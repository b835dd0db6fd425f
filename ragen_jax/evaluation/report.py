"""The results of `--mode=eval`: tables, JSON, TensorBoard events."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from ragen_jax.agent.episode import Episode
from ragen_jax.agent.metrics import is_reported, k_values
from ragen_jax.evaluation.intervals import Interval, level_intervals
from ragen_jax.runs.metrics import write_events
from ragen_jax.runs.table import table
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils.files import replace_file

VERSION = 1
# Maximum length of a column's name, so that a table of five columns is at most 100 characters wide.
_COLUMN_WIDTH = 15

# Metric -> label in the tables, which end with the metrics that environments report; other metrics appear in the JSON
# file only.
_LABELS = {
  'success': 'success',
  'fraction_of_optimal': 'of the best',
  'pass@': 'pass@',
  'episodic_return': 'reward',
  'score': 'with penalty',
  'num_turns': 'turns',
  'num_actions': 'actions',
  'action_is_valid': 'valid replies',
  'observation_score': 'observed',
  'prediction_score': 'predicted',
  'truncated': 'truncated',
  'response_length': 'reply tokens',
  'no_reply': 'no reply',
  'env_errors': 'env errors',
}


@dataclasses.dataclass
class EvaluationRow:
  """One policy on one environment.

  Attributes:
    kind: 'model', 'random', 'solver' or 'endpoint'.
    tag: the environment.
    sampling: how tokens are drawn, see `describe_sampling`; empty for random play and solvers.
    episodes: number of episodes on all levels.
    metrics: name -> interval, see `level_intervals`.
  """

  policy: str
  kind: str
  tag: str
  sampling: str
  levels: int
  episodes: int
  metrics: dict[str, Interval]

  def to_json(self) -> dict[str, Any]:
    """The row as JSON; numbers that are not finite become None."""
    numbers = {
      name: {end: x if math.isfinite(x) else None for end, x in dataclasses.asdict(interval).items()}
      for name, interval in self.metrics.items()
    }
    return dataclasses.asdict(self) | {'metrics': numbers}


def make_row(
  policy: str, kind: str, tag: str, sampling: str, episodes: list[Episode], group_size: int, best: np.ndarray | None
) -> EvaluationRow:
  """A row from one policy's episodes, with contiguous groups; episodes of other environments are ignored.

  `best` is as in `level_intervals`, the other arguments as in `EvaluationRow`.
  """
  own = [e for e in episodes if e.tag == tag]
  metrics = level_intervals(own, group_size, best, network=kind == 'endpoint')
  return EvaluationRow(policy, kind, tag, sampling, len(own) // group_size, len(own), metrics)


def describe_sampling(sampling: Sampling) -> str:
  """'temperature 0.5', 'greedy', 'temperature 1, top-p 0.9'."""
  if sampling.temperature == 0:
    return 'greedy'
  parts = [f'temperature {sampling.temperature:g}']
  parts += [f'top-p {sampling.top_p:g}'] if sampling.top_p < 1 else []
  parts += [f'top-k {sampling.top_k}'] if sampling.top_k else []
  return ', '.join(parts)


# -- Files -------------------------------------------------------------------------------------------------------------


def free_name(directory: pathlib.Path, head: dict[str, Any]) -> str:
  """A name for the files of an evaluation that no other evaluation in the directory of JSON files has.

  The evaluation's JSON without its rows, `head`, identifies it. A repeated evaluation gets the same name, so its files
  are replaced.
  """
  tags = head['eval']['tags']
  kind = 'baselines' if head['eval']['step'] == 'none' else 'base'
  kind = kind if head['checkpoint'] is None else f'step_{head["checkpoint"]}'
  name = '_'.join([kind, *(tags if len(tags) <= 3 else [*tags[:2], f'and_{len(tags) - 2}_more'])])
  number, candidate = 1, name
  while (path := directory / f'{candidate}.json').exists():
    try:
      old = json.loads(path.read_text())
      if {key: x for key, x in old.items() if key != 'rows'} == head:
        break
    except (OSError, ValueError, AttributeError):
      pass  # the file of another program, or a damaged file, is kept
    number += 1
    candidate = f'{name}_{number}'
  return candidate


def write_json(path: pathlib.Path, head: dict[str, Any], rows: list[EvaluationRow]) -> dict[str, Any]:
  """Writes the JSON of an evaluation and returns its content; UserError if the disk is full or not writable."""
  content = head | {'rows': [row.to_json() for row in rows]}
  replace_file(path, json.dumps(content, indent=1, allow_nan=False) + '\n')
  return content


def write_row_events(workdir: str, name: str, step: int, rows: list[EvaluationRow]) -> None:
  """Writes a TensorBoard run for each kind of policy below `<workdir>/tb/evaluation`, so that they share their charts.

  Earlier events of the evaluation `name` are replaced. Raises UserError if the disk is full or not writable.
  """
  runs: dict[str, dict[str, float]] = {}
  for row in rows:
    run = ('greedy' if row.sampling == 'greedy' else 'sampled') if row.kind == 'model' else row.kind
    for metric, interval in row.metrics.items():
      ends = {'': interval.mean, '/low': interval.low, '/high': interval.high}
      own = {f'eval/{row.tag}/{metric}{end}': x for end, x in ends.items() if math.isfinite(x)}
      runs.setdefault(run, {}).update(own)
  for run, scalars in runs.items():
    write_events(os.path.join(workdir, 'tb', 'evaluation', run), name, step, scalars)


# -- Tables ------------------------------------------------------------------------------------------------------------


def tables(rows: list[EvaluationRow], group_size: int) -> list[str]:
  """One table for each environment, with a column for each policy; at most 100 characters wide for five columns."""
  out = []
  for tag in dict.fromkeys(row.tag for row in rows):
    own = [row for row in rows if row.tag == tag]
    best = own[0].metrics.get('optimal')
    possible = f', best possible success {best.mean:.3f}' if best else ''
    title = f'{tag}: {own[0].levels} levels, {group_size} episode{"s" * (group_size > 1)} each{possible}'
    names = []
    for metric in _LABELS:
      each = [f'pass@{k}' for k in k_values(group_size)[1:]] if metric == 'pass@' else [metric]
      names += [(m, m if metric == 'pass@' else _LABELS[m]) for m in each if any(m in row.metrics for row in own)]
    names += [(name, name) for name in dict.fromkeys(m for row in own for m in row.metrics) if is_reported(name)]
    cells = [[label, *(_cell(row.metrics.get(name)) for row in own)] for name, label in names]
    header = ['', *(_shorten(_column_name(row)) for row in own)]
    out.append(table([['', *(_shorten(row.sampling) for row in own)], *cells], title, header=header))
  return out


def _column_name(row: EvaluationRow) -> str:
  """The name of a policy's column; a model without a checkpoint is named above all tables."""
  if row.kind == 'model' and not row.policy.startswith('checkpoint'):
    return 'model'
  return row.policy.removeprefix('endpoint ')


def _cell(interval: Interval | None) -> str:
  """'0.439 ± 0.028': the mean and half of its interval."""
  if interval is None or math.isnan(interval.mean):
    return '-'
  digits = 3 if abs(interval.mean) < 10 else 1
  half = (interval.high - interval.low) / 2
  return f'{interval.mean:.{digits}f}' + ('' if math.isnan(half) else f' ± {half:.{digits}f}')


def _shorten(name: str) -> str:
  return name if len(name) <= _COLUMN_WIDTH else name[: _COLUMN_WIDTH - 1] + '…'
