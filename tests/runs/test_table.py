"""Aligned tables."""

from __future__ import annotations

from ragen_jax.runs.table import table


def test_table():
  rows = [('success before', 0.24), ('success after', 0.4567), ('turns', 5)]
  assert table(rows, 'FrozenLake 4x4') == '\n'.join(
    [
      'FrozenLake 4x4',
      '---------------------',
      'success before  0.240',
      'success after   0.457',
      'turns               5',
    ]
  )


def test_table_with_a_header_and_text_cells():
  rows = [('rollout', 61.25, '51 %'), ('update', 8.0, '7 %'), ('rest',)]
  assert table(rows, 'Time', header=('phase', 'seconds', 'share')) == '\n'.join(
    [
      'Time',
      '-----------------------',
      'phase    seconds  share',
      '-----------------------',
      'rollout   61.250  51 %',
      'update     8.000  7 %',
      'rest',
    ]
  )
  assert table([], 'Nothing') == 'Nothing\n-------'
