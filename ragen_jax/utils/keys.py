"""Keys of servers, from environment variables."""

from __future__ import annotations

import os

from ragen_jax.utils.errors import UserError


def read_key(variable: str) -> str:
  """The API key in an environment variable, '' without one; UserError if the key cannot be sent."""
  key = os.environ.get(variable, '').strip()
  if not (key.isascii() and key.isprintable()) or ' ' in key:
    raise UserError(f'the environment variable {variable} has characters that no key has')
  return key
