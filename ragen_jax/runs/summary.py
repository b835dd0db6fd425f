"""What a run came to, in one table."""

from __future__ import annotations

import os
import sys

from ml_collections import ConfigDict

from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.table import table

_PHASES = {
  'gen': 'rollout',
  'adv': 'advantages',
  'update_actor': 'update',
  'testing': 'evaluation',
  'save_checkpoint': 'checkpoints',
}


def summarize(config: ConfigDict, workdir: str, page: str | None = None) -> dict[str, float]:
  """Writes the run's table to standard output, from the metrics in `workdir`.

  Args:
    config: the run's.
    workdir: where it is kept.
    page: the trajectory viewer, if there is one.

  Returns:
    The metrics of the last evaluation.
  """
  lines = read_metrics(workdir)
  evaluations = [line for line in lines if 'val-env/success' in line]
  first, last = evaluations[0], evaluations[-1]
  rows = []
  for tag in config.eval.tags:
    best = last.get(f'val-env/{tag}/optimal')
    for label, prefix in (('sampled', 'val-env'), ('greedy', 'val-greedy')):
      name = f'{prefix}/{tag}/success'
      if name in last:
        share = f'{last[name] / best:.0%}' if best else '-'
        possible = 'not known' if best is None else f'{best:.3f}'
        rows.append([f'{tag}, {label}', f'{first[name]:.3f}', f'{last[name]:.3f}', possible, share])
  episodes = config.eval.groups * config.eval.group_size
  out = [
    table(
      rows,
      f'Success on {config.eval.groups} held-out levels, {episodes} episodes',
      header=['', 'before', f'after {int(last["step"])}', 'best possible', 'of it'],
    )
  ]
  totals = {label: sum(line.get(f'timing_s/{key}', 0.0) for line in lines) for key, label in _PHASES.items()}
  whole = sum(totals.values())
  out.append(
    table(
      [[label, f'{s:.1f} s', f'{s / whole:.0%}'] for label, s in totals.items()] + [['all', f'{whole:.1f} s', '']],
      'Time',
    )
  )
  out.append(f'Metrics, checkpoints and TensorBoard files: {workdir}')
  if page:
    out.append(f'Episodes, turn by turn, for a browser: {page}')
  out.append(f'tensorboard --logdir {os.path.join(workdir, "tb")}')
  sys.stdout.write('\n'.join(['', *out, '']))
  return last
