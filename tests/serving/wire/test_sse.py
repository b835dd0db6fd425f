"""Server-sent events."""

from __future__ import annotations

import json

import pytest

from ragen_jax.serving.wire import sse


def test_an_event_is_one_line_of_json():
  data = {'text': 'a\n\nb ü\u2028', 'type': 'x'}
  raw = sse.event(data)
  assert raw.startswith(b'data: {') and raw.endswith(b'}\n\n') and raw.count(b'\n') == 2
  assert json.loads(raw.removeprefix(b'data: ')) == data
  assert sse.named_event(data) == b'event: x\n' + raw


def test_numbers_that_json_lacks_are_errors():
  with pytest.raises(ValueError):
    sse.event({'x': float('nan')})
