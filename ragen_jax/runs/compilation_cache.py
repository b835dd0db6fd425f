"""The cache of compiled programs."""

from __future__ import annotations

import os

import jax

from ragen_jax.runs.stores import is_address


def use_compilation_cache(directory: str, workdir: str | os.PathLike[str]) -> None:
  """Keeps compiled programs in `config.compilation_cache`, on disk or in a bucket, so that later runs start faster."""
  if not directory:
    return
  if directory == 'auto':
    directory = f'{workdir}/xla_cache'  # JAX writes to buckets itself
  jax.config.update('jax_compilation_cache_dir', directory if is_address(directory) else os.path.abspath(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
