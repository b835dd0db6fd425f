"""Traces of iterations: which ones, what is in them, and that a profiler that fails stops nothing."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.config.checks import check_config
from ragen_jax.runs.profile import Profile
from ragen_jax.runs.timing import Timer
from tests.support.configs import assert_refused, small_config


@jax.jit
def squares_of_a_profile(x):
  return x @ x


def _iterate(workdir, span, iterations):
  """Iterations with two phases each; returns the traces."""
  timer, profile = Timer(), Profile(span, workdir)
  for i in iterations:
    profile.begin(i)
    with timer('gen'):
      squares_of_a_profile(jnp.ones((64, 64))).block_until_ready()
    with timer('update_actor'):
      pass
  profile.close()
  profile.close()
  return sorted(pathlib.Path(workdir).rglob('*.xplane.pb'))


def _events(path):
  """(name, its numbers) of what the host did."""
  planes = jax.profiler.ProfileData.from_file(str(path)).planes
  return [(event.name, dict(event.stats)) for plane in planes for line in plane.lines for event in line.events]


@pytest.mark.parametrize(
  ('span', 'iterations', 'traced'),
  [
    ((2, 3), range(1, 6), [2, 3]),
    ((2, 9), range(1, 4), [2, 3]),  # the run ends in the span
    ((1, 4), range(3, 6), [3, 4]),  # it is resumed in the span
    ((1, 2), range(3, 6), []),
    ((), range(1, 3), []),
  ],
)
def test_the_span_is_traced(tmp_path, span, iterations, traced):
  squares_of_a_profile(jnp.ones((64, 64)))  # compiled before
  paths = _iterate(tmp_path, span, iterations)
  assert len(paths) == bool(traced)
  if traced:
    assert paths[0].parent.parent == tmp_path / 'tb' / 'plugins' / 'profile'  # where TensorBoard looks for them
    events = _events(paths[0])
    assert [numbers['step_num'] for name, numbers in events if name == 'iteration'] == traced
    for phase in ('gen', 'update_actor'):
      assert [name for name, _ in events].count(phase) == len(traced)
    assert any('squares_of_a_profile' in name or 'dot' in name for name, _ in events)


def test_xprof_opens_a_trace(tmp_path):
  convert = pytest.importorskip('xprof.convert.raw_to_tool_data', reason='needs xprof: pip install xprof')
  paths = [str(path) for path in _iterate(tmp_path, (1, 2), range(1, 4))]
  tools = convert.xspace_to_tool_names(paths)
  assert {'trace_viewer@', 'overview_page'} <= set(tools) | {f'{tool}@' for tool in tools}
  data, _ = convert.xspace_to_tool_data(paths, 'trace_viewer', {})
  assert b'update_actor' in (data if isinstance(data, bytes) else data.encode())


def test_a_profiler_that_fails_is_reported_and_stops_nothing(tmp_path, monkeypatch, caplog):
  def fails(*_, **__):
    raise RuntimeError('only one\nprofile at a time')

  monkeypatch.setattr(jax.profiler, 'start_trace', fails)
  assert _iterate(tmp_path, (1, 2), range(1, 4)) == []
  (record,) = caplog.records
  assert record.getMessage() == ('profile: the iterations are not traced: RuntimeError: only one profile at a time')


@pytest.mark.parametrize('span', [(3,), (0, 2), (3, 2), (1.0, 2.0), ('1', '2'), (1, 2, 3)])
def test_spans_that_are_none(span):
  assert_refused(check_config, small_config(profile=span), r'^profile=\(.*\): must be two numbers of iterations, ')


def test_spans():
  for span in ((), (1, 1), (3, 9)):
    check_config(small_config(profile=span))
