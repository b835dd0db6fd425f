from __future__ import annotations

import dataclasses

from ragen_jax.utils import alike


@dataclasses.dataclass(frozen=True)
class _Settings:
  x: object


def _made(most=2):
  made = []

  @alike.made_once(most)
  def make(settings, more=0):
    """Words."""
    made.append((settings, more))
    return object()

  return make, made


def test_what_is_alike_is_made_once():
  make, made = _made()
  assert make(_Settings(1.5), 3) is make(_Settings(1.5), 3) and len(made) == 1
  assert make(_Settings(1.5), 4) is not make(_Settings(1.5), 3)
  assert make.__doc__ == 'Words.'


def test_what_is_equal_and_not_alike_is_made_for_each():
  make, _ = _made(8)
  assert len({make(_Settings(x)) for x in (0.0, -0.0, False, 0)}) == 4


def test_only_the_last_ones_are_kept():
  make, made = _made(2)
  first = make(_Settings(1))
  make(_Settings(2))
  assert make(_Settings(1)) is first
  make(_Settings(3))  # drops 2, which was not asked for longest
  assert make(_Settings(1)) is first
  make(_Settings(2))
  assert len(made) == 4


def test_after_all_is_forgotten_it_is_made_anew():
  make, _ = _made()
  first = make(_Settings(1))
  alike.forget()
  assert make(_Settings(1)) is not first
