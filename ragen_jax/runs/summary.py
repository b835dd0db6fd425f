"""The summary of a run: success before and after, and the time of each phase."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.staging import address
from ragen_jax.runs.table import table

_log = logging.getLogger(__name__)

# Name of a phase in the metrics -> its label.
_PHASES = {
  'gen': 'rollout',
  'adv': 'advantages',
  'update_actor': 'update',
  'testing': 'evaluation',
  'save_checkpoint': 'checkpoints',
}


def summarize(
  workdir: str | os.PathLike[str], tags: Sequence[str], *, levels: int, group_size: int, page: str | None = None
) -> dict[str, float]:
  """Writes the tables of a run to standard output, from the metrics in `workdir`.

  Returns the metrics of the last evaluation; empty if metrics.jsonl has none, because it was deleted after the run.

  Args:
    tags: environments of its evaluations.
    levels: number of held-out levels of an evaluation, over all tags.
    group_size: number of episodes of each level.
    page: path of the trajectory viewer's page, if there is one.
  """
  lines = read_metrics(workdir)
  evaluations = [line for line in lines if 'val-env/success' in line]
  out = [_times(lines)]
  if evaluations:
    before = evaluations[0] if evaluations[0]['step'] == 0 else {}
    out.insert(0, _success(before, evaluations[-1], tags, levels, group_size))
  else:
    path = address(os.path.join(workdir, 'metrics.jsonl'), workdir)
    _log.warning(
      '%s has no evaluation, so it was deleted or emptied after the run; --mode=eval evaluates the checkpoints', path
    )
  out.append(f'Metrics, checkpoints and TensorBoard files: {workdir}')
  if page:
    out.append(f'Episodes, turn by turn, for a browser: {address(page, workdir)}')
  out.append(f'tensorboard --logdir {address(os.path.join(workdir, "tb"), workdir)}')
  sys.stdout.write('\n'.join(['', *out, '']))
  return evaluations[-1] if evaluations else {}


def _success(
  before: dict[str, float], last: dict[str, float], tags: Sequence[str], levels: int, group_size: int
) -> str:
  """Success before training, a dash if `before` lacks it, and in the last evaluation."""
  rows = []
  for tag in tags:
    best = last.get(f'val-env/{tag}/optimal')
    for label, prefix in (('sampled', 'val-env'), ('greedy', 'val-greedy')):
      name = f'{prefix}/{tag}/success'
      if name in last:
        share = f'{last[name] / best:.0%}' if best else '-'
        possible = 'not known' if best is None else f'{best:.3f}'
        earlier = f'{before[name]:.3f}' if name in before else '-'
        rows.append([f'{tag}, {label}', earlier, f'{last[name]:.3f}', possible, share])
  return table(
    rows,
    f'Success on {levels} held-out levels, {levels * group_size} episodes',
    header=['', 'before', f'after {int(last["step"])}', 'best possible', 'share of best'],
  )


def _times(lines: list[dict[str, float]]) -> str:
  """Seconds of each phase, over the whole run."""
  totals = {label: sum(line.get(f'timing_s/{key}', 0.0) for line in lines) for key, label in _PHASES.items()}
  whole = sum(totals.values())
  rows = [[label, f'{s:.1f} s', f'{s / (whole or 1):.0%}'] for label, s in totals.items()]
  return table([*rows, ['all', f'{whole:.1f} s', '']], 'Time')
