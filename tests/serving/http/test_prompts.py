"""The prompts of requests, in a session and outside of attempts."""

from __future__ import annotations

import pytest

from ragen_jax.agent.segments import Encoded
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role
from ragen_jax.serving.conversation.sessions import Session
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.http import prompts
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.spec import Kind
from tests.support.scripted import ASK, SAMPLING
from tests.support.wire import generated, limits


@pytest.fixture(scope='module')
def fmt(tok):
  return QwenFormat(tok, keep_thoughts=True)


@pytest.fixture
def session(fmt):
  return Session('a', fmt)


def parse(kind, **fields):
  return ENDPOINTS[kind].parse({'model': 'policy', **fields}, limits(context=4000, vocabulary=1000))


def answer(tok, session, plan, call_id):
  """Commits a plan with the reply 'Two.'."""
  said = [Message(Role.ASSISTANT, 'Two.')]
  session.commit(plan, generated(tok, 'Two.'), call_id=call_id, replies=said, params=SAMPLING, trained=True)


def test_each_reply_has_a_prompt(fmt, session, tok):
  spec = parse(Kind.CHAT, messages=ASK, n=2)
  found = [p.ids for p in prompts.outside(fmt, spec)]
  assert found == [fmt.render(spec.messages, spec.tools, spec.template)] * 2
  plans = prompts.plan(fmt, session, spec, 'd')
  assert [p.prompt for p in plans] == found and [p.choice for p in plans] == [0, 1]


def test_prompts_of_completions_are_texts_and_ids(fmt, session, tok):
  spec = parse(Kind.COMPLETIONS, prompt=['a<|im_end|>', 'b'], n=2)
  found = [p.ids for p in prompts.outside(fmt, spec)]
  assert found == [fmt.encode_untrusted('a<|im_end|>')] * 2 + [fmt.encode_untrusted('b')] * 2
  assert tok.stop_ids[0] not in found[0], 'a spelled token is text'
  assert prompts.outside(fmt, parse(Kind.COMPLETIONS, prompt=[5, 6])) == [Encoded((5, 6))]
  assert [p.prompt for p in prompts.plan(fmt, session, spec, 'd')] == found


def test_a_response_that_is_continued_keeps_its_system_message(fmt, session, tok):
  (plan,) = prompts.plan(fmt, session, parse(Kind.RESPONSES, instructions='Be brief.', input='One?'), 'd')
  answer(tok, session, plan, 'resp_1')
  (longer,) = prompts.plan(fmt, session, parse(Kind.RESPONSES, input='And?', previous_response_id='resp_1'), 'e')
  assert longer.row == 0 and tok.decode(longer.prompt).count('Be brief.') == 1
  other = parse(Kind.RESPONSES, instructions='Be long.', input='And?', previous_response_id='resp_1')
  (changed,) = prompts.plan(fmt, session, other, 'f')
  text = tok.decode(changed.prompt)
  assert 'Be long.' in text and 'Be brief.' not in text and changed.row == 1


def test_unknown_responses_are_refused(fmt, session):
  spec = parse(Kind.RESPONSES, input='a', previous_response_id='resp_7')
  for ask in (lambda: prompts.outside(fmt, spec), lambda: prompts.plan(fmt, session, spec, 'd')):
    with pytest.raises(ApiError, match="'resp_7': the attempt has no such response") as e:
      ask()
    assert e.value.code == 'previous_response_not_found'
