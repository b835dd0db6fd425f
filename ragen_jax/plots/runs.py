"""The data of the figures: metrics and events of runs, and groups of runs that differ only in the seed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ragen_jax.plots import matrix
from ragen_jax.runs.config_fields import fields_of, flatten, has_effect, in_this_version
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.stores import is_address
from ragen_jax.utils.errors import UserError

# Fields that name a curve before all others.
_NAMED_FIRST = ('train.tags', 'model.preset', 'algorithm.adv_estimator')
# Sections whose fields need no section name in a label.
_CLEAR_SECTIONS = ('algorithm', 'optimizer', 'train', 'model')


@dataclasses.dataclass(frozen=True)
class Run:
  """The data of a run for figures.

  Attributes:
    config: dotted name -> value; empty if config.json is missing.
    series: metric -> (steps i64[K], values f64[K]), finite values only.
    marks: (step, kind) of events, see `find_marks`.
    best: the best possible held-out success, mean over tags; None if unknown.
    evaluations: file name -> evaluation of `--mode=eval`.
    warm_start: whether it is a run of `--mode=sft`.
  """

  workdir: str | os.PathLike[str]
  config: dict[str, Any]
  series: dict[str, tuple[np.ndarray, np.ndarray]]
  marks: list[tuple[int, str]]
  best: float | None
  evaluations: dict[str, dict[str, Any]]
  warm_start: bool = False


@dataclasses.dataclass(frozen=True)
class Curve:
  """Runs that differ only in the seed, with a label that distinguishes them from other curves."""

  label: str
  runs: tuple[Run, ...]


# -- Reading -----------------------------------------------------------------------------------------------------------


def check_different(workdirs: Sequence[str]) -> None:
  """Raises UserError if a directory does not exist, or if a workdir is given twice."""
  seen: dict[str, str] = {}
  for workdir in workdirs:
    if not is_address(workdir) and not os.path.isdir(workdir):
      raise UserError(f'--workdir={workdir}: there is no such directory')
    real = workdir.rstrip('/') if is_address(workdir) else os.path.realpath(workdir)
    if real in seen:
      also = f', also as {seen[real]}' if seen[real] != workdir else ''
      raise UserError(f'--workdir={workdir} is given twice{also}')
    seen[real] = workdir


def read_runs(workdirs: Sequence[str | os.PathLike[str]], metrics: Sequence[str]) -> list[Run]:
  """Reads several runs; arguments and errors as for `read_run`."""
  return [read_run(workdir, metrics) for workdir in workdirs]


def read_run(workdir: str | os.PathLike[str], metrics: Sequence[str]) -> Run:
  """Reads the data of a run, which may be in progress.

  Raises:
    UserError: the directory contains neither metrics nor evaluations, or one of its files is damaged.
  """
  root = pathlib.Path(workdir)
  evaluations = matrix.read_evaluations(root)
  if not (root / 'metrics.jsonl').exists() and not evaluations:
    raise UserError(
      f'--workdir={workdir}: has no metrics.jsonl, as the workdir of a run has, and no evaluation/*.json of --mode=eval'
    )
  rows = read_metrics(root) if (root / 'metrics.jsonl').exists() else []
  if not rows and not evaluations:
    raise UserError(f'--workdir={workdir}: metrics.jsonl has no iterations yet')
  config = _read_config(root / 'config.json')
  series = {}
  for metric in metrics:
    points = [(row['step'], row[metric]) for row in rows if np.isfinite(row.get(metric, np.nan))]
    if points:
      steps, values = zip(*points, strict=True)
      series[metric] = np.asarray(steps, np.int64), np.asarray(values, np.float64)
  warm_start = any(name.startswith('sft/') for row in rows for name in row)
  return Run(workdir, config, series, find_marks(rows, config), _best_possible(rows), evaluations, warm_start)


def _read_config(path: pathlib.Path) -> dict[str, Any]:
  """Dotted name -> value; empty if the file does not exist."""
  if not path.exists():
    return {}
  try:
    return flatten(json.loads(path.read_text()))
  except (OSError, ValueError, TypeError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e


def find_marks(rows: Sequence[dict[str, float]], config: dict[str, Any]) -> list[tuple[int, str]]:
  """Events of a run, from the rows of metrics.jsonl and its config, dotted name -> value.

  A warning is marked at its first step; it ends the run if `monitor.echo_trap` is 'stop'. A rollback is recognised by
  the smaller learning rate of the next iteration.

  Returns:
    (step, kind) in the order of steps, with the most severe kind of each step: 'Echo-Trap warning', 'rollback' or 'run
    stopped'.
  """
  found: dict[int, str] = {}
  warned, scale, rollbacks, before = False, None, 0, 0
  action, most = config.get('monitor.echo_trap'), config.get('monitor.max_rollbacks', len(rows))
  for row in rows:
    step = int(row['step'])
    if scale is not None and row.get('train/lr_scale', scale) < scale:
      found[before] = 'rollback'
      rollbacks, warned = rollbacks + 1, False
    scale = row.get('train/lr_scale', scale)
    if 'echo_trap/warning' in row:
      fresh, warned = row['echo_trap/warning'] > 0 and not warned, row['echo_trap/warning'] > 0
      last = action == 'stop' or (action == 'rollback' and rollbacks >= most)
      if fresh:
        found[step] = 'run stopped' if last else 'Echo-Trap warning'
    if any(value > 0 for name, value in row.items() if name.startswith('early_stopped/')):
      found[step] = 'run stopped'
    before = step
  return sorted(found.items())


def _best_possible(rows: Sequence[dict[str, float]]) -> float | None:
  """Mean over tags in the last evaluation; None if it is unknown for a tag."""
  last = next((row for row in reversed(rows) if 'val-env/success' in row), {})
  tags = [match[1] for name in last if (match := re.fullmatch('val-env/(.+)/success', name))]
  best = [last.get(f'val-env/{tag}/optimal', np.nan) for tag in tags]
  return float(np.mean(best)) if best and np.all(np.isfinite(best)) else None


# -- Groups of runs and their labels -----------------------------------------------------------------------------------


def group(runs: Sequence[Run]) -> list[Curve]:
  """Groups runs that differ only in `seed` into curves, in the order of each curve's first run.

  Runs with the same config and the same seed are not grouped, and neither are runs without config.json. Fields that do
  not affect learning (such as the places of checkpoints and logs) are ignored.
  """
  groups: dict[Any, list[Run]] = {}
  known = frozenset().union(*(run.config for run in runs))
  for run in runs:
    fields = {name: value for name, value in _learning_fields(run, known).items() if name != 'seed'}
    key = json.dumps(fields, sort_keys=True) if run.config else str(run.workdir)
    number = 0
    while any(other.config.get('seed') == run.config.get('seed') for other in groups.get((key, number), [])):
      number += 1
    groups.setdefault((key, number), []).append(run)
  parts = list(groups.values())
  labels = name_differences([_learning_fields(part[0], known) for part in parts])
  names = _directory_names([part[0].workdir for part in parts])
  labels = [label if part[0].config else name for label, name, part in zip(labels, names, parts, strict=True)]
  if len(parts) == 1 and parts[0][0].config:
    tags = parts[0][0].config.get('train.tags')
    labels = [_format_value(tags) if tags and len(parts[0]) > 1 else names[0]]
  curves = []
  for label, name, part in zip(labels, names, parts, strict=True):
    if labels.count(label) > 1 or not label:  # several curves with the same settings
      label = f'{label} ({name})' if label else name
    curves.append(Curve(f'{label} ({len(part)} seeds)' if len(part) > 1 else label, tuple(part)))
  return curves


def _directory_names(workdirs: Sequence[str | os.PathLike[str]]) -> list[str]:
  """A name for each directory: the last parts of its path, as many as no other one has."""
  paths = [(str(w) if is_address(w) else os.path.abspath(w)).rstrip('/').split('/') for w in workdirs]
  names = []
  for path in paths:
    ends = (path[-n:] for n in range(1, len(path) + 1))
    names.append('/'.join(next((end for end in ends if sum(p[-len(end) :] == end for p in paths) == 1), path)))
  return names


def _learning_fields(run: Run, known: Collection[str]) -> dict[str, Any]:
  """The fields that affect a run's learning, without options of environments that it does not play.

  Those of `known` that the run's version did not have yet have the values that it acted by; a run without config has
  none.
  """
  if not run.config:
    return {}
  used = {*run.config.get('train.tags', ()), *run.config.get('eval.tags', ())}
  own, others = (fields_of('warm_start'), fields_of('training')) if run.warm_start else (frozenset(), frozenset())
  used |= {*run.config.get('sft.tags', ())} if run.warm_start else set()
  fields = {
    name: value
    for name, value in in_this_version(run.config, known).items()
    if (has_effect(name) or name in own)
    and name not in others
    and not (name.startswith('envs.') and name.split('.')[1] not in used)
  }
  return {'mode': 'sft' if run.warm_start else 'train'} | fields


def name_differences(configs: Sequence[dict[str, Any]]) -> list[str]:
  """A short name for each config (dotted name -> value), made from the fields other than `seed` in which they differ.

  Up to three such fields are all named. If there are more, the name has the smallest number of fields that distinguish
  the configs; environment, model and estimator come first. A field that is missing in a config (of an older version) is
  ignored. A name is such as 'adv_estimator=gae, actor_lr=0.001', and empty for an empty config.
  """
  known = [c for c in configs if c]
  shared = [name for name in (known or [{}])[0] if name != 'seed' and all(name in c for c in known)]
  differing = [name for name in shared if any(c[name] != known[0][name] for c in known)]
  differing.sort(key=lambda name: _NAMED_FIRST.index(name) if name in _NAMED_FIRST else len(_NAMED_FIRST))
  if len(differing) > 3:
    chosen: list[str] = []
    for name in differing:
      if len({_values(c, [*chosen, name]) for c in known}) > len({_values(c, chosen) for c in known}):
        chosen.append(name)
    differing = chosen
  parts = [name.rpartition('.') for name in differing]
  last = [field for _, _, field in parts]
  shown = [
    field if section in _CLEAR_SECTIONS and last.count(field) == 1 else name
    for (section, _, field), name in zip(parts, differing, strict=True)
  ]
  return [
    ', '.join(f'{short}={_format_value(c[name])}' for short, name in zip(shown, differing, strict=True)) if c else ''
    for c in configs
  ]


def _values(config: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
  return tuple(json.dumps(config[name]) for name in names)


def _format_value(value: Any) -> str:
  """A field's value in at most 32 characters."""
  text = (
    '+'.join(map(str, value)) if isinstance(value, list) else f'{value:g}' if isinstance(value, float) else str(value)
  )
  return text if len(text) <= 32 else f'{text[:31]}…'
