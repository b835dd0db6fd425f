"""The sandbox, where it can be used."""

import pytest

from ragen_jax.envs.dataset.sandbox import Sandbox


@pytest.fixture(scope='session')
def sandbox() -> Sandbox:
  """A sandbox with the Python of the tests."""
  try:
    found = Sandbox()
    found.check()
  except ValueError as e:
    if 'does not confine' in str(e):  # it runs and is no sandbox
      raise
    pytest.skip(f'needs bubblewrap: {e}')
  return found
