"""A figure of generalisation: one row for each set of training tags, one column for each evaluated tag.

The numbers come from `<workdir>/evaluation/*.json`, which `--mode=eval` writes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

METRIC = 'success'
VERSION = 1
# Kinds of rows without training; they come last, in this order.
_OTHERS = ('base', 'endpoint', 'random', 'solver')


@dataclasses.dataclass(frozen=True)
class Table:
  """Success, averaged over seeds; NaN where nothing was evaluated.

  Attributes:
    sampling: how tokens were drawn, e.g. 'temperature 0.5'.
    rows: names of the R rows: the training tags, then policies without training.
    columns: the C evaluated tags.
    mean: f64[R, C].
    half: f64[R, C], mean of the evaluations' half 95 % intervals; NaN if one of them has no interval.
    own: bool[R, C], whether the row was trained on the column's tag.
  """

  sampling: str
  rows: tuple[str, ...]
  columns: tuple[str, ...]
  mean: np.ndarray
  half: np.ndarray
  own: np.ndarray


def read_evaluations(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """File name -> evaluation, for all evaluations of a workdir from old to new.

  Raises UserError if one is damaged or has another version.
  """
  found = {}
  for path in sorted((workdir / 'evaluation').glob('*.json'), key=lambda path: path.stat().st_mtime_ns):
    try:
      evaluation = json.loads(path.read_text(encoding='utf-8'))
      version = evaluation['version']
      if version == VERSION:
        _entries(evaluation, '')
        _ = (evaluation['checkpoint'] or 0) + 0
    except (OSError, ValueError, KeyError, TypeError) as e:
      raise UserError(f'{path} is not an evaluation of --mode=eval ({type(e).__name__}: {e}); remove it') from e
    if version != VERSION:
      raise UserError(f'{path} has version {version!r}; only version {VERSION} can be read')
    found[path.name] = evaluation
  return found


@dataclasses.dataclass(frozen=True)
class _Entry:
  """One policy on one tag; `kind` is 'trained' or one of `_OTHERS`, `row` is the row's name."""

  kind: str
  row: str
  trained_on: tuple[str, ...]
  tag: str
  sampling: str
  mean: float
  half: float


def _entries(evaluation: dict[str, Any], curve: str) -> list[_Entry]:
  found = []
  trained_on = tuple(evaluation['trained_on'])
  for row in evaluation['rows']:
    value = row['metrics'].get(METRIC)
    if value is None or value['mean'] is None:  # no episodes
      continue
    kind, own = row['kind'], ()
    if kind == 'model' and evaluation['checkpoint'] is None:
      kind, name = 'base', f'{evaluation["model"]}, as it is'
    elif kind == 'model':
      kind, name, own = 'trained', curve, trained_on
    else:
      name = {'random': 'random actions', 'solver': 'solver'}.get(kind, row['policy'])
    # A single level has no interval.
    half = (value['high'] - value['low']) / 2 if None not in (value['low'], value['high']) else np.nan
    found.append(_Entry(kind, name, own, row['tag'], row['sampling'], float(value['mean']), half))
  return found


def tables(runs: Sequence[tuple[str, dict[str, dict[str, Any]]]]) -> dict[str, Table]:
  """Name of a figure's file -> matrix of some runs, one for each way of sampling.

  A run is the label of its curve, and file name -> evaluation. Runs of one curve are averaged. Evaluations of policies
  without training are averaged too, if several runs have them. If several checkpoints of a run were evaluated, the last
  one is used. If evaluations of a cell have different settings, the newest is used, with a warning. A row's name is its
  training tags, followed by the curve's label if several curves have the same tags.
  """
  cells: dict[tuple, list[_Entry]] = {}  # (kind, row, trained on, sampling, tag) -> one entry a run
  for curve, files in runs:
    own: dict[tuple, _Entry] = {}
    last, sources = max((e['checkpoint'] or 0 for e in files.values()), default=0), {}
    for name, evaluation in files.items():
      if evaluation['checkpoint'] not in (None, last):
        _log.warning('%s: %s is left out: the last checkpoint with an evaluation is %d', curve, name, last)
        continue
      for e in _entries(evaluation, curve):
        key = e.kind, e.row, e.trained_on, e.sampling, e.tag
        if key in own and own[key] != e:
          _log.warning('%s: %s of %s replaces that of %s, whose settings differ', curve, e.tag, name, sources[key])
        own[key], sources[key] = e, name
    for key, e in own.items():
      cells.setdefault(key, []).append(e)
  names = {key[:3]: ' + '.join(key[2]) if key[0] == 'trained' else key[1] for key in cells}
  same = list(names.values())
  for key, name in names.items():
    seeds = max(len(entries) for cell, entries in cells.items() if cell[:3] == key)
    if key[0] == 'trained' and same.count(name) > 1:
      names[key] = f'{name}: {key[1]}'
    elif key[0] == 'trained' and seeds > 1:
      names[key] = f'{name} ({seeds} seeds)'
  rows = sorted(names, key=lambda key: (*_OTHERS,).index(key[0]) if key[0] in _OTHERS else -1)
  tags = dict.fromkeys(tag for key in rows for tag in key[2])
  columns = tuple(dict.fromkeys([t for t in tags if any(key[4] == t for key in cells)] + [key[4] for key in cells]))
  found = {}
  samplings = list(dict.fromkeys(key[3] for key in cells if key[3])) or ([''] if cells else [])
  for sampling in samplings:
    there = [row for row in rows if any(key[:3] == row and key[3] in ('', sampling) for key in cells)]
    mean, half = np.full((2, len(there), len(columns)), np.nan)
    for i, row in enumerate(there):
      for j, tag in enumerate(columns):
        entries = cells.get((*row, sampling, tag)) or cells.get((*row, '', tag))
        if entries:
          mean[i, j] = np.mean([e.mean for e in entries])
          half[i, j] = np.mean([e.half for e in entries])
    trained = np.array([[tag in row[2] for tag in columns] for row in there], bool).reshape(mean.shape)
    slug = re.sub(r'[^a-z0-9.]+', '_', sampling.lower()).strip('_')
    file = 'generalisation' if len(samplings) == 1 else f'generalisation_{slug}'
    found[file] = Table(sampling, tuple(names[row] for row in there), columns, mean, half, trained)
  return found


def draw(table: Table) -> Any:
  """The matrix as a heat map: success, and below it half of its interval; a matplotlib `Figure`."""
  from matplotlib import colormaps
  from matplotlib.figure import Figure
  from matplotlib.patches import Rectangle

  rows, columns = table.mean.shape
  names = max(len(name) for name in table.rows)
  width = 0.06 * names + 0.62 * columns + 1.0
  figure = Figure(figsize=(max(width, 3.5), 0.36 * rows + 1.5), layout='constrained')
  axis = figure.subplots()
  top = float(np.nanmax(table.mean)) or 1.0
  shade = colormaps['cividis']
  image = axis.imshow(table.mean, cmap=shade, vmin=0, vmax=top, aspect='auto')
  axis.grid(False)
  axis.spines[:].set_visible(False)
  axis.set_xticks(range(columns), table.columns, rotation=30, ha='right', rotation_mode='anchor')
  axis.set_yticks(range(rows), table.rows)
  axis.tick_params(length=0)
  axis.set_xlabel('evaluated on (framed: was trained on)' if table.own.any() else 'evaluated on')
  axis.set_ylabel('trained on')
  axis.set_title(
    f'Success on held-out levels{", " * bool(table.sampling)}{table.sampling}\n± half of the 95 % interval'
  )
  for i, j in np.argwhere(np.isfinite(table.mean)):
    r, g, b, _ = shade(table.mean[i, j] / top)
    ink = 'black' if 0.299 * r + 0.587 * g + 0.114 * b > 0.5 else 'white'
    axis.text(j, i - 0.03, f'{table.mean[i, j]:.2f}', ha='center', va='bottom', color=ink)
    if np.isfinite(table.half[i, j]):
      axis.text(j, i + 0.05, f'±{table.half[i, j]:.2f}', ha='center', va='top', color=ink, fontsize=6)
    if table.own[i, j]:
      axis.add_patch(Rectangle((j - 0.47, i - 0.45), 0.94, 0.9, fill=False, edgecolor='#D55E00', linewidth=1.8))
  axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
  axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
  axis.grid(which='minor', color='white', linewidth=1.5, alpha=1)
  axis.tick_params(which='minor', length=0)
  figure.colorbar(image, ax=axis, label='success', fraction=0.05)
  return figure
