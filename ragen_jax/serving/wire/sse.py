"""Wire: server-sent events, as bytes."""

from __future__ import annotations

import json
from typing import Any

DONE = b'data: [DONE]\n\n'
# A comment without the empty line that ends an event: some clients read every event as JSON.
KEEP_ALIVE = b': keepalive\n'
# Keeps an answer that is no stream alive; JSON may begin with white space.
PADDING = b' '
CONTENT_TYPE = 'text/event-stream; charset=utf-8'


def encode_json(value: Any) -> bytes:
  """JSON without white space; ValueError if a number is not finite."""
  return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':')).encode()


def event(data: Any) -> bytes:
  """An event without a name, as chat completions and completions stream them."""
  return b'data: %s\n\n' % encode_json(data)


def named_event(data: dict[str, Any]) -> bytes:
  """An event named after its type, as responses stream them."""
  return b'event: %s\n%s' % (data['type'].encode(), event(data))
