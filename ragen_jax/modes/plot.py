"""`--mode=plot`: draws figures of one or several runs. Runs that differ only in the seed form one curve."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Sequence

from ragen_jax.plots import matrix
from ragen_jax.plots.curves import PANELS, draw_panels
from ragen_jax.plots.runs import check_different, group, read_runs
from ragen_jax.plots.style import figure_style, save_figure
from ragen_jax.runs.staging import StagedWorkdir, address
from ragen_jax.runs.workdir import open_workdir
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def plot(workdirs: Sequence[str], output: str | None = None) -> list[str]:
  """Draws the figures of runs, which may be in progress, each as PNG and SVG; logs and returns their paths.

  The directory `output` is by default `plots` in the workdir of a single run, or next to the first of many. Raises
  UserError if a workdir is missing, given twice, or has nothing to draw, or the figures cannot be written.
  """
  check_different(workdirs)
  with contextlib.ExitStack() as stack:
    places = [stack.enter_context(open_workdir(workdir, write=False)) for workdir in workdirs]
    if len(places) > 1 and isinstance(places[0], StagedWorkdir) and not output:
      raise UserError('--output is missing; figures of several runs are written next to the first only on a disk')
    return [address(path, places[0]) for path in _plot(places, output)]


def _plot(workdirs: Sequence[str | StagedWorkdir], output: str | None) -> list[str]:
  curves = group(read_runs(workdirs, [panel.metric for panel in PANELS]))
  tables = matrix.tables([(curve.label, run.evaluations) for curve in curves for run in curve.runs])
  panels = [p for p in PANELS if any(p.metric in run.series for curve in curves for run in curve.runs)]
  if not panels and not tables:
    raise UserError(f'--workdir={workdirs[0]}: the run has not logged any metric of the figures yet')
  first = os.path.abspath(workdirs[0])
  directory = pathlib.Path(output or os.path.join(first if len(workdirs) == 1 else os.path.dirname(first), 'plots'))
  for panel in PANELS:
    if panels and panel not in panels and not panel.optional:
      _log.info('%s is left out: no run has %s', panel.name, panel.metric)
  paths: list[str] = []
  drawn = [curve for curve in curves if any(run.series for run in curve.runs)]
  with figure_style():
    if panels:
      paths += save_figure(draw_panels(panels, drawn, width=7.2), directory / 'curves')
    for panel in panels:
      paths += save_figure(draw_panels([panel], drawn, width=3.5), directory / panel.name)
    for name, table in tables.items():
      paths += save_figure(matrix.draw(table), directory / name)
  for curve in curves:
    _log.info('%s: %s', curve.label, ', '.join(str(run.workdir) for run in curve.runs))
  names = ', '.join(pathlib.Path(path).stem for path in paths[::2])
  _log.info('written to %s, each as PNG and SVG: %s', address(directory, workdirs[0]), names)
  return paths
