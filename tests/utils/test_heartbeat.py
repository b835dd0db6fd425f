"""Lines that tell how far a slow stage is."""

from __future__ import annotations

import logging

from ragen_jax.utils.heartbeat import SECONDS, Heartbeat


def test_a_line_is_logged_once_in_a_while_and_none_for_what_is_quick(caplog):
  now = [100.0]
  with caplog.at_level(logging.INFO):
    heartbeat = Heartbeat('playing: %d of %d episodes are over', 8, lambda: now[0])
    for seconds, done in [(1, 1), (SECONDS - 2, 2), (2, 3), (SECONDS - 1, 4), (5, 5), (2 * SECONDS, 8)]:
      now[0] += seconds
      heartbeat.beat(done)
  assert [r.getMessage() for r in caplog.records] == [
    'playing: 3 of 8 episodes are over after 31 s',
    'playing: 5 of 8 episodes are over after 65 s',
    'playing: 8 of 8 episodes are over after 125 s',
  ]


def test_parts_are_counted_before_they_are_used(caplog):
  now = [0.0]
  with caplog.at_level(logging.INFO):
    heartbeat = Heartbeat('%d of %d', 5, lambda: now[0])
    for part in heartbeat.over('abc', 2):
      now[0] += SECONDS * (part != 'a')
  assert [r.getMessage() for r in caplog.records] == ['4 of 5 after 30 s']
