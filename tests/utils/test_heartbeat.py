"""Lines that tell how far a slow stage is."""

from __future__ import annotations

import logging
from concurrent import futures

from ragen_jax.utils.heartbeat import SECONDS, Heartbeat


def test_a_line_is_logged_once_in_a_while_and_none_for_what_is_quick(caplog):
  now = [100.0]
  with caplog.at_level(logging.INFO):
    heartbeat = Heartbeat('playing: %d of %d episodes are over', 8, lambda: now[0])
    for seconds, count in [(1, 1), (SECONDS - 2, 1), (1, 1), (SECONDS - 1, 1), (5, 1), (2 * SECONDS, 0)]:
      now[0] += seconds
      heartbeat.advance(count)
  assert [r.getMessage() for r in caplog.records] == [
    'playing: 3 of 8 episodes are over after 30 s',
    'playing: 5 of 8 episodes are over after 64 s',
    'playing: 5 of 8 episodes are over after 124 s',
  ]


def test_a_part_is_done_when_the_next_is_asked_for(caplog):
  now = [0.0]
  with caplog.at_level(logging.INFO):
    heartbeat = Heartbeat('%d of %d', 6, lambda: now[0])
    heartbeat.advance(2)
    for part in heartbeat.over('abc'):
      now[0] += SECONDS * (part == 'b')
    assert list(heartbeat.over('d')) == ['d']
    now[0] += SECONDS
    heartbeat.advance(0)
  assert [r.getMessage() for r in caplog.records] == ['4 of 6 after 30 s', '6 of 6 after 60 s']


def test_threads_count_together(caplog):
  now = [0.0]
  heartbeat = Heartbeat('%d of %d', 400, lambda: now[0])
  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(lambda _: [heartbeat.advance() for _ in range(100)], range(4)))
  now[0] = SECONDS
  with caplog.at_level(logging.INFO):
    heartbeat.advance(0)
  assert [r.getMessage() for r in caplog.records] == ['400 of 400 after 30 s']
