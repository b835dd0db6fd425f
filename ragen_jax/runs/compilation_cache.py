"""The cache of compiled programs."""

from __future__ import annotations

import os

import jax


def use_compilation_cache(directory: str, workdir: str) -> None:
  """Keeps compiled programs on disk, so that later runs start faster.

  Args:
    directory: directory of the programs; 'auto' is `<workdir>/xla_cache`, '' keeps none.
    workdir: the run's directory.
  """
  if not directory:
    return
  if directory == 'auto':
    directory = os.path.join(workdir, 'xla_cache')
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
