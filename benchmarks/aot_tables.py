"""The tables of docs/performance.md, from the results of benchmarks/aot.py."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

_GIB = 2**30
_FIRST = '0.5b v5e:2x4'
_GROWTH = (_FIRST, '0.5b v5e:4x4', '0.5b v5e:8x8', '0.5b v5e:16x16')


def number(x: float | None, digits: int = 2, unit: float = 1) -> str:
  """A number in a unit; '-' where it is not known."""
  return '-' if x is None else f'{x / unit:.{digits}f}'


def share(x: float | None) -> str:
  """A share in per cent."""
  return '-' if x is None else f'{x:.0%}'


def _total(values: Iterable[float | None]) -> float | None:
  """The sum; None if a part is not known."""
  values = list(values)
  return None if None in values else sum(values)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
  return '\n'.join('| ' + ' | '.join(cells) + ' |' for cells in (head, ['---'] * len(head), *rows))


def cases_table(results: dict[str, Any], *, ahead: bool) -> str:
  """One line a case.

  Args:
    results: of benchmarks/aot.py.
    ahead: programs were compiled ahead; without, a run waits for all.
  """
  waits = ['of it waits for memory s'] if ahead else []
  head = ['Model and machine', 'GiB: rollout, evaluation, update', 'Rollout s', 'Scoring s', 'Update s', 'Links s',
          'Iteration s', *waits, 'MFU of the update', 'Decode steps', 'Idle rows', 'Step / floor',
          'Gathered a token, GB', 'Programs: first iteration, run', 'CPU s of their compilation',
          'of these awaited at least, until iteration' if ahead else 'of these awaited, until iteration',
          'Chip-hours']  # fmt: skip
  rows = []
  for name, case in sorted(results['cases'].items()):
    e = case['estimate']
    # Only some programs of the larger machines are compiled.
    if not e or name in _GROWTH[1:]:
      continue
    device, made = {n: x['device'] for n, x in e['parts'].items()}, e['compilation']
    rows.append(
      [
        name,
        ', '.join(number(e['memory'].get(phase), 1, _GIB) for phase in ('rollout', 'evaluation', 'update')),
        number(_total(device[n] for n in ('extend', 'decode', 'arrange'))),
        number(device['scoring']),
        number(_total(device[n] for n in ('gradients', 'optimiser'))),
        number(_total(x['links'] for x in e['parts'].values())),
        number(e['iteration']),
        *([number(_total(x.get('waiting') for x in e['parts'].values()))] if ahead else []),
        share(e['mfu']),
        str(e['rollout']['decode']) if 'rollout' in e else '',
        share(e['rollout']['idle']) if 'rollout' in e else '',
        number(e['decode_to_floor']),
        number(e['decode']['gathered'], 3, 1e9),
        ', '.join(map(str, made['programs'])),
        ', '.join(number(x, 0) for x in made['cpu_seconds']),
        _awaited(made, ahead=ahead),
        number(e['chip_hours'], 1),
      ]
    )
  return _table(head, rows)


def _awaited(made: dict[str, Any], *, ahead: bool) -> str:
  """CPU seconds of the compilation that a run waits for, and its last iteration that waits; '-' if not known."""
  if 'awaited' in made:
    return f'{number(made["awaited"][1], 0)}, {made["last_awaited"]}'
  return '-' if ahead else f'{number(made["cpu_seconds"][1], 0)}, {made["last_new"]}'


def programs_table(case: dict[str, Any]) -> str:
  """One line a program of a case."""
  head = ['Program', 'Shape', 'Compile CPU s', 'GiB', 'of it temporary', 'ms', 'Links ms', 'Runs an iteration']
  rows = []
  for name, p in case['programs'].items():
    if 'failure' in p:
      rows.append([name, p.get('shape', ''), f'refused: {p["failure"]}', *[''] * 5])
      continue
    rows.append(
      [
        name,
        p['shape'],
        number(p['compile_cpu_seconds'], 0),
        number(p['hbm'], 2, _GIB),
        number(p['temporary'], 2, _GIB),
        number(p['seconds'], 2, 1e-3),
        number(p['link_seconds'], 2, 1e-3),
        f'{p["runs"]:.4g}',
      ]
    )
  return _table(head, rows)


def growth_table(results: dict[str, Any]) -> str:
  """The same work for each chip on ever more chips, without waits for memory, which not all results have."""
  head = ['Machine', 'Chips', 'Iteration s', 'of it links s', 'Sent a chip and gradient, GB', 'Efficiency']
  rows, first = [], None
  for name in _GROWTH:
    case = results['cases'].get(name)
    e = case and case['estimate']
    if not e:
      continue
    # Scoring is compiled for the smallest machine only.
    parts = [x for n, x in e['parts'].items() if n != 'scoring']
    seconds, links = _total(x[n] for x in parts for n in ('device', 'links')), _total(x['links'] for x in parts)
    seconds = seconds and seconds - sum(x.get('waiting') or 0 for x in parts)
    first = first or seconds
    sent = case['programs']['gradient']['cost']['work']['sent']
    efficiency = first / seconds if first and seconds else None
    rows.append([
      case['topology'], str(e['chips']), number(seconds), number(links), number(sent, 2, 1e9), share(efficiency)
    ])  # fmt: skip
  return _table(head, rows)


def write_page(page: pathlib.Path, now: pathlib.Path, before: pathlib.Path) -> None:
  """Replaces the tables of a page, each between a line '<!-- table: NAME -->' and the next '<!-- end -->'.

  Args:
    page: docs/performance.md.
    now: results of benchmarks/aot.py.
    before: those of an earlier state of the program, if there are any.
  """
  tables = {}
  for prefix, file in (('', now), ('before ', before)):
    if file.exists():
      results = json.loads(file.read_text())
      tables |= {f'{prefix}cases': cases_table(results, ahead=not prefix), f'{prefix}growth': growth_table(results)}
      if _FIRST in results['cases']:
        tables[f'{prefix}programs'] = programs_table(results['cases'][_FIRST])
  lines, skipping = [], False
  for line in page.read_text().splitlines():
    if line == '<!-- end -->':
      skipping = False
    if not skipping:
      lines.append(line)
    if line.startswith('<!-- table: '):
      name = line.removeprefix('<!-- table: ').removesuffix(' -->')
      if name in tables:
        lines += ['', tables[name], '']
        skipping = True
  page.write_text('\n'.join(lines) + '\n')
