"""Compiled programs are kept where the config says, and used again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from ragen_jax.runs.compilation_cache import use_compilation_cache

_FIELDS = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')


@pytest.fixture(autouse=True)
def _settings_of_the_tests():
  """What a test changes is undone: the other tests share a cache of their own."""
  before = {name: getattr(jax.config, name) for name in _FIELDS}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  jax_cache.reset_cache()


def test_no_directory_leaves_everything_as_it_is(tmp_path):
  before = [getattr(jax.config, name) for name in _FIELDS]
  use_compilation_cache('', str(tmp_path))
  assert [getattr(jax.config, name) for name in _FIELDS] == before and not list(tmp_path.iterdir())


def test_auto_is_in_the_workdir_and_other_places_do_not_depend_on_where_the_program_goes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for directory, expected in (('auto', 'runs/a/xla_cache'), ('programs', 'programs'), (f'{tmp_path}/x', 'x')):
    use_compilation_cache(directory, 'runs/a')
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / expected)


def test_programs_are_written_there(tmp_path):
  use_compilation_cache('auto', str(tmp_path))
  jax_cache.reset_cache()
  assert jax.config.jax_persistent_cache_min_compile_time_secs > 0  # programs that compile at once are not worth a file
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  x = jnp.arange(7.0)
  assert float(jax.jit(lambda x: jnp.sum(x * 3 + 1))(x)) == 70
  assert [path.name for path in (tmp_path / 'xla_cache').iterdir() if path.name.startswith('jit')]
