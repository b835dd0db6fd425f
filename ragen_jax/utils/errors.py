"""The one exception that a user is meant to read."""

from __future__ import annotations


class UserError(Exception):
  """Bad input or a bad place to write: the message is one line that says what is wrong and what may be done.

  `main.py` shows the message without a traceback and exits with a non-zero status.

  Attributes:
    everywhere: all processes of the run raise it, at the same place.
  """

  def __init__(self, message: str, everywhere: bool = False):
    super().__init__(message)
    self.everywhere = everywhere
