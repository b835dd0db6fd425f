"""Whether a complete reply with true descriptions fits into the tokens and the words that a run allows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence

from ragen_jax.agent.templates import format_reply
from ragen_jax.agent.world_model.descriptions import describe
from ragen_jax.agent.world_model.formats import described_sections
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec

_log = logging.getLogger(__name__)

_TAG = re.compile('<[^>]*>')


def complete_replies(spec: EnvSpec, form: str, scenes: Iterable[Scene]) -> list[str]:
  """A reply of a form for each scene: true descriptions in each section, no reasoning, and one action.

  The prediction describes the state before the action, which has about as many things.
  """
  action = spec.env.example_actions('')[0]
  return [
    format_reply(dict.fromkeys(described_sections(form), describe(scene)), [action], form=form, action_sep='')
    for scene in scenes
  ]


def warn_if_too_long(
  spec: EnvSpec, replies: Sequence[str], count_tokens: Callable[[str], int], *, form: str, max_response_tokens: int
) -> None:
  """Warns, in one line for each limit, if complete replies are longer than the tokens or the words of a reply.

  `count_tokens` tells how many tokens are sampled for a reply.
  """
  tokens = [count_tokens(reply) for reply in replies]
  words = [len(_TAG.sub(' ', reply).split()) for reply in replies]
  # A tokenizer with tokens for whole sentences belongs to a model that was trained on them, whatever its prompt says.
  counted = words if all(t >= w for t, w in zip(tokens, words, strict=True)) else []
  section = f'envs.{spec.tag}' if spec.max_response_tokens else 'agent'
  for field, limit, found, unit in (
    (f'{section}.max_response_tokens', max_response_tokens, tokens, 'tokens'),
    (f'envs.{spec.tag}.max_words', spec.max_words, counted, 'words'),
  ):
    over = sum(n > limit for n in found)
    if over:
      _log.warning(
        '%s=%d: on %d of %d levels of %s, a complete reply of agent.format=%r has more, up to %d %s without reasoning',
        field, limit, over, len(found), spec.tag, form, max(found), unit,
      )  # fmt: skip
