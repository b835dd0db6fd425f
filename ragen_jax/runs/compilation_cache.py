"""The cache of compiled programs."""

from __future__ import annotations

import os

import jax

from ragen_jax.runs.stores import is_address


def use_compilation_cache(directory: str, workdir: str | os.PathLike[str]) -> None:
  """Keeps compiled programs on disk, so that later runs start faster.

  Args:
    directory: directory of the programs, or an address in a bucket; 'auto' is `<workdir>/xla_cache`, '' keeps none.
  """
  if not directory:
    return
  if directory == 'auto':
    directory = f'{workdir}/xla_cache'  # JAX writes to buckets itself
  jax.config.update('jax_compilation_cache_dir', directory if is_address(directory) else os.path.abspath(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
