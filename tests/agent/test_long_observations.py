"""Long observations: what is kept, what the mark says, and what is fed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import CONTEXTS, ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.long_observations import LEAST_TOKENS, cut
from ragen_jax.agent.segments import ImageSegment, TextSegment
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from tests.support.speakers import ScriptedText, context_settings, limits, scripted_tokens

TINY = ChatTokenizer(presets.resolve('tiny', ''))
_MARK = re.compile(r'\n\[\.\.\. (\d+) more tokens\]')
_TEXTS = st.text(alphabet='ab \n<|>é√😀im_end0', min_size=0, max_size=300)


def _count(text: str) -> int:
  return len(TINY.encode_once(text))


@settings(max_examples=150, deadline=None)
@given(_TEXTS, st.integers(LEAST_TOKENS, 120))
def test_a_text_is_unchanged_or_cut_within_the_limit_and_the_mark_counts_the_rest(text, most):
  shown = cut(text, most, TINY)
  harmless = text.replace('<|', '< |')
  if shown == text:
    assert _count(harmless) <= most
    return
  found = list(_MARK.finditer(shown))[-1]
  kept = shown[: found.start()]
  assert found.end() == len(shown) and harmless.startswith(kept) and _count(harmless) > most >= _count(shown)
  assert int(found[1]) >= _count(harmless) - _count(kept) > 0
  assert cut(shown, most, TINY) == shown
  assert _count(shown) >= most - 2 * LEAST_TOKENS  # not much more is cut than must be


def test_special_tokens_stay_plain_text_and_are_not_split():
  text = '<|im_end|><|im_start|>' * 40
  for most in range(LEAST_TOKENS, 80):
    shown = cut(text, most, TINY)
    assert '<|' not in shown and not set(TINY.encode(shown)) & set(
      TINY.added[t] for t in ('<|im_end|>', '<|im_start|>')
    )


def _image(shade: int) -> ImageSegment:
  return ImageSegment(np.full((4, 4, 3), shade, np.uint8), 9)


def test_images_stay_whole_and_only_text_counts():
  images = [_image(i) for i in range(3)]
  parts = (TextSegment('a' * 20), images[0], TextSegment('b' * 100), images[1], TextSegment('c' * 40), images[2])
  shown = cut(parts, 80, TINY)
  assert [part for part in shown if isinstance(part, ImageSegment)] == images
  texts = [part.text for part in shown if isinstance(part, TextSegment)]
  assert texts[0] == 'a' * 20 and re.fullmatch(r'b+\n\[\.\.\. \d+ more tokens\]', texts[1]) and len(texts) == 2
  kept = texts[1].count('b')
  assert sum(map(_count, texts)) <= 80 and f'... {160 - 20 - kept} more' in texts[1]
  assert shown[1] == images[0] and shown[3:] == (images[1], images[2])
  assert cut(parts, 160, TINY) is parts
  # A text that would leave no room for the mark is cut itself.
  tight = cut((TextSegment('a' * 75), images[0], TextSegment('b' * 100)), 80, TINY)
  assert sum(_count(part.text) for part in tight if isinstance(part, TextSegment)) <= 80 and tight[1:] == (images[0],)


class Page:
  """Shows a long page, and a longer one after each action."""

  rules = 'Read.'

  def reset(self, seed):
    self.pages = 1
    return 'z' * 400

  def step(self, action):
    self.pages += 1
    return 'y' * 400 * self.pages, 1.0, False, False


def _proxy(most: int, policy: str = 'full') -> AgentProxy:
  env = registry.make('python', {'class_path': f'{__name__}:Page'})
  spec = EnvSpec('Page', env, Budget(3, 9, 3), 30, 1, max_observation_tokens=most)
  context = ContextManager(TINY, [spec], context_settings(context=policy))
  return AgentProxy(EnvStateManager([spec], 2), context, limits(max_turns=3, max_context=8192))


@pytest.mark.parametrize('policy', CONTEXTS)
@pytest.mark.slow_cases('limited_multi_turn')
def test_what_is_fed_of_an_observation_is_within_the_limit(policy):
  replies = [['</think><answer>on</answer>'] * 3] * 2
  rollout = _proxy(50, policy).rollout(scripted_tokens(TINY, replies), 0)
  t = rollout.trajectory
  for row, length in zip(t.tokens, t.length, strict=True):
    text = TINY.decode(row[:length])
    shown = re.findall(r'([yz]+\n\[\.\.\. \d+ more tokens\])', text)
    assert shown and 'y' * 60 not in text and 'z' * 60 not in text
    assert all(_count(x) <= 50 for x in shown)
  whole = _proxy(0, policy).rollout(scripted_tokens(TINY, replies), 0).trajectory
  assert whole.length.max() > t.length.max() + 500
  assert rollout.episodes[0].turns[0].observation.startswith('z' * 20)


def test_messages_have_the_same_cut():
  rollout = _proxy(40).rollout(ScriptedText(['<think></think><answer>on</answer>'] * 3), 0, pictured=[0])
  contents = [message['content'] for message in rollout.episodes[0].turns[-1].chat if message['role'] == 'user']
  assert len(contents) == 3 and all(_MARK.search(content) for content in contents)
