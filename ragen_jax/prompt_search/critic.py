"""The critic: a model on an OpenAI-compatible server that writes critiques and prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.episode import Chat
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

# Statuses that concern one request, such as a prompt that is too long, and not the address, the key or the model.
_OF_ONE_REQUEST = (400, 413, 422)


class Critic:
  """Asks the critic, with `at_a_time` requests in flight together."""

  def __init__(self, speaker: EndpointSpeaker, at_a_time: int):
    self._speaker, self.at_a_time = speaker, at_a_time

  def replies(self, chats: Sequence[Chat]) -> list[str | None]:
    """The replies in order; None for a lost one. Raises UserError if the server is away, or refuses key or model."""
    found: list[str | None] = []
    while len(found) < len(chats):
      try:
        said = self._speaker.replies(list(chats[len(found) :]))
      except UserError as e:
        # The server has not answered before, and it is the first of these requests that it refused.
        if getattr(e.__cause__, 'status', 0) not in _OF_ONE_REQUEST:
          raise
        _log.warning('a request to the critic was refused: %s', e)
        found.append(None)
        continue
      found += [reply.text if reply.answered else None for reply in said]
    return found
