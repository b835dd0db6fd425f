"""Answers of a server, and the waits that it asks for."""

from __future__ import annotations

import email.utils
import time

import pytest

from ragen_jax.agent.endpoint_client import read_reply, retry_after
from ragen_jax.agent.episode import TextReply
from tests.support.chat_server import good


@pytest.mark.parametrize(
  ('answer', 'said'),
  [
    (good('<answer>Up</answer>', reasoning_content='hm'), TextReply('<think>hm</think><answer>Up</answer>', 3)),
    (good('<think>a</think>b', reasoning='hm'), TextReply('<think>a</think>b', 3)),
    (good(None), TextReply('', 3)),
    (good('Up', usage=None), TextReply('Up', None)),
    (good('Up', usage={'completion_tokens': -1}), TextReply('Up', None)),
    (good('Up', usage={'completion_tokens': 10**400}), TextReply('Up', None)),
    (good('\ud800'), TextReply('?', 3)),
  ],
)
def test_what_replies_look_like(answer, said):
  assert read_reply(answer[2].encode()) == said


def test_retry_after_is_a_number_of_seconds_or_a_date():
  for value, seconds in ((None, 0), ('', 0), ('2.5', 2.5), ('-1', 0), ('inf', 0), ('nan', 0), ('soon', 0)):
    assert retry_after(value) == seconds
  assert 58 < retry_after(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
