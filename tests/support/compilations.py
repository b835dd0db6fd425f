"""What JAX compiles while a test runs."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
  """Names of the functions that are compiled meanwhile, in the order in which their compilation begins."""
  found: list[str] = []

  class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
      if name := re.match(r'Compiling jit\((.*?)\)', record.getMessage()):
        found.append(name[1])

  logger, handler = logging.getLogger('jax'), Handler()
  logger.addHandler(handler)
  try:
    with jax.log_compiles():
      yield found
  finally:
    logger.removeHandler(handler)
