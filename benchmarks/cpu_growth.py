"""How work on a CPU grows with its size and with what it is divided among: runs for benchmarks/cpu.py, and figures."""

from __future__ import annotations

import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.runs.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
_DEVICES, _PROCESSES = (1, 2, 4, 8), (1, 2, 4)
_LIMIT_S = 900  # of a run
_KEYS = (('sampling_s', 'sampling'), ('update_s', 'update'))


def divided(paths: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
  """Seconds of rollouts and updates of the same FrozenLake job on more devices, and with more processes.

  The cores are the same, so the seconds that are added are those of dividing the work.
  """
  del paths
  quick = cases['built-in'].rows < 64
  groups, iterations = (8, 2) if quick else (32, 5)
  flags = [
    '--config=configs/frozenlake_ppo.py', f'--config.train.groups={groups}', '--config.train.group_size=4',
    f'--config.optimizer.mini_batch_size={groups * 4}', f'--config.num_iterations={iterations}',
    '--config.eval.every=0', '--config.checkpoint.every=0', '--config.eval.groups=8',
    '--config.model.attention=blocks',
  ]  # fmt: skip
  found: dict[str, Any] = {'episodes': groups * 4, 'iterations': iterations, 'devices': [], 'processes': []}
  for n in _DEVICES[:2] if quick else _DEVICES:
    found['devices'].append({'value': n} | _times(flags, devices=n, processes=1))
  for n in _PROCESSES[:2] if quick else _PROCESSES:
    found['processes'].append({'value': n} | _times(flags, devices=1, processes=n))
  return found


def _times(flags: Sequence[str], *, devices: int, processes: int) -> dict[str, float]:
  """Medians of the iterations behind the first, which compiles. CalledProcessError if a process fails."""
  variables = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  with tempfile.TemporaryDirectory() as workdir, socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # JAX's coordinator takes the port that is held
    held.bind(('127.0.0.1', 0))
    commands = [[sys.executable, 'main.py', *flags, f'--workdir={workdir}'] for _ in range(processes)]
    if processes > 1:
      for i, command in enumerate(commands):
        command += [f'--coordinator=127.0.0.1:{held.getsockname()[1]}', f'--num_processes={processes}']
        command += [f'--process_id={i}']
    running = [subprocess.Popen(x, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL) for x in commands]
    try:
      for command, process in zip(commands, running, strict=True):
        if process.wait(_LIMIT_S):
          raise subprocess.CalledProcessError(process.returncode, command)
    finally:
      for process in running:
        process.kill()
        process.wait()
    lines = [line for line in read_metrics(workdir) if 'timing_s/gen' in line][1:]
  names = {'sampling_s': 'timing_s/gen', 'update_s': 'timing_s/update_actor'}
  return {key: statistics.median(line[name] for line in lines) for key, name in names.items()}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
  """The slope of the line through the logarithms: 1 if the time is proportional to the size."""
  return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def draw(record: dict[str, Any], figures: pathlib.Path) -> list[pathlib.Path]:
  """Draws the parts of a record of benchmarks/cpu.py to a folder; gives the files."""
  panels = {name: points for name, points in record.get('growth', {}).items() if name not in ('base', 'hardware')}
  panels |= {name: record['divided'][name] for name in ('devices', 'processes') if 'divided' in record}
  drawn = []
  if panels:
    drawn.append(figures / 'cpu_growth.png')
    _draw_growth(panels, drawn[-1])
  if 'context' in record:
    drawn.append(figures / 'cpu_context.png')
    _draw_context(record['context'], drawn[-1])
  return drawn


def _log_axis(axis: Any, sizes: Sequence[int], label: str) -> None:
  axis.set(xscale='log', yscale='log', xlabel=label, xticks=sizes, xticklabels=[f'{size:,}' for size in sizes])
  axis.minorticks_off()


def _draw_context(found: dict[str, Any], path: pathlib.Path) -> None:
  """Draws the time of a decode step and the state of a row against the context; all axes are logarithmic."""
  from matplotlib import pyplot

  from ragen_jax.plots.style import figure_style

  with figure_style():
    figure, axes = pyplot.subplots(1, 2, figsize=(6.4, 2.6), layout='constrained')
    panels = (
      ('step_ms', 'ms of a decode step', 1, (0.3, 1, 3, 10)),
      ('row_bytes', 'KiB of state a row', 1024, (16, 64, 256, 1024, 4096)),
    )
    for axis, (key, label, unit, ticks) in zip(axes, panels, strict=True):
      for name in dict.fromkeys(point['model'] for point in found['points']):
        own = [point for point in found['points'] if point['model'] == name]
        sizes = [point['columns'] for point in own]
        values = [point[key] / unit for point in own]
        axis.plot(sizes, values, marker='o', label=f'{name}, exponent {exponent(sizes, values):.2f}')
      _log_axis(axis, sizes, 'columns of context')
      axis.set(ylabel=label, yticks=ticks, yticklabels=[f'{tick:,}' for tick in ticks])
      axis.legend(loc='upper left')
    figure.savefig(path, bbox_inches='tight')


def _draw_growth(panels: dict[str, list[dict[str, float]]], path: pathlib.Path) -> None:
  """Draws seconds against the size, a panel for each kind of growth; all axes are logarithmic."""
  from matplotlib import pyplot

  from ragen_jax.plots.style import figure_style

  columns = (len(panels) + 1) // 2
  with figure_style():
    figure, grid = pyplot.subplots(2, columns, figsize=(3 * columns, 5.2), squeeze=False, layout='constrained')
    for axis, (name, points) in zip(grid.flat, panels.items(), strict=False):
      sizes = [point['value'] for point in points]
      for key, label in _KEYS:
        seconds = [point[key] for point in points]
        axis.plot(sizes, seconds, marker='o', label=f'{label}, exponent {exponent(sizes, seconds):.2f}')
      _log_axis(axis, sizes, name)
      low, high = axis.get_ylim()
      axis.set_ylim(low, high * 2)  # room for the legend
      ticks = [n * 10.0**e for e in range(-4, 4) for n in (1, 2, 5) if low <= n * 10.0**e <= high]
      axis.set(yticks=ticks, yticklabels=[f'{tick:g}' for tick in ticks])
      axis.legend(loc='upper left')
    for axis in grid.flat[len(panels) :]:
      axis.set_axis_off()
    for axis in grid[:, 0]:
      axis.set_ylabel('seconds')
    figure.savefig(path, bbox_inches='tight')
