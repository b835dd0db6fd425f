"""Compiled programs are dropped before the process has as many memory mappings as Linux allows it."""

from __future__ import annotations

import sys

import jax
import pytest

from ragen_jax.utils import mappings
from tests.support.processes import copy_python


@pytest.mark.parametrize(
  ('most', 'maps', 'dropped'),
  [('10', 5, False), ('10', 6, True), ('x', 6, False), (None, 6, False), ('10', None, False)],
)
def test_programs_are_dropped_above_half_of_the_limit(tmp_path, monkeypatch, caplog, most, maps, dropped):
  calls = []
  monkeypatch.setattr(jax, 'clear_caches', lambda: calls.append(1))
  caplog.set_level('INFO', 'ragen_jax')
  (tmp_path / 'proc/sys/vm').mkdir(parents=True)
  (tmp_path / 'proc/self').mkdir()
  if most is not None:
    (tmp_path / 'proc/sys/vm/max_map_count').write_text(f'{most}\n')
  if maps is not None:
    (tmp_path / 'proc/self/maps').write_text('7f00-7f01 r-xp\n' * maps)
  assert mappings.drop_programs(str(tmp_path)) == dropped
  assert calls == [1] * dropped
  assert [m for m in caplog.messages if 'has 6 of the 10 memory mappings' in m] == caplog.messages[:1]
  assert len(caplog.messages) == dropped


def test_programs_of_accelerators_are_kept(tmp_path, monkeypatch):
  (tmp_path / 'proc/sys/vm').mkdir(parents=True)
  (tmp_path / 'proc/self').mkdir()
  (tmp_path / 'proc/sys/vm/max_map_count').write_text('1')
  (tmp_path / 'proc/self/maps').write_text('7f00-7f01 r-xp\n')
  monkeypatch.setattr(jax, 'clear_caches', lambda: pytest.fail('dropped'))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert not mappings.drop_programs(str(tmp_path))


@pytest.mark.skipif(sys.platform != 'linux', reason='Linux has the limit')
def test_dropped_programs_have_no_mappings_and_compute_the_same_again():
  result = copy_python("""
import jax, jax.numpy as jnp
from ragen_jax.utils import mappings

def count():
  return sum(1 for _ in open('/proc/self/maps'))

@jax.jit
def f(x):
  for k in range(30):
    x = jnp.sort(jnp.cumsum(jnp.sin(x) * k, axis=0) @ x, axis=0)
  return x

x = jnp.arange(16.0).reshape(4, 4) / 16
(x @ x).block_until_ready()
before, first = count(), f(x)
with_programs = count()
assert not mappings.drop_programs()
mappings._MOST = 0
assert mappings.drop_programs()
after = count()
assert with_programs > before + 50 > after, (before, with_programs, after)
assert (f(x) == first).all()
print('as before')
""")
  assert result.returncode == 0 and 'as before' in result.stdout, result.stderr
