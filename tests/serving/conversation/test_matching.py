"""The reply that a conversation continues: the longest match, and the choice between replies that look the same."""

from __future__ import annotations

from ragen_jax.serving.conversation.matching import Conversation, ReplyIndex, SampledReply
from tests.support.calls import CharacterFormat, assistant, system, user

FORMAT = CharacterFormat()
START = (system('s'), user('u'))


def _conversation(*messages, tools=()):
  return Conversation.of(FORMAT, messages, tools, None)


def _reply(call_id, conversation, *forms, tool_ids=(), request=0, choice=0):
  return SampledReply(
    call_id, row=0, end=0, request=request, choice=choice, closed=True, thinks=False, conversation=conversation,
    texts=FORMAT.canonical(forms), tool_ids=tool_ids,
  )  # fmt: skip


def _index(*replies):
  index = ReplyIndex()
  for reply in replies:
    index.add(reply)
  return index


def _match(index, *messages, tools=(), previous=''):
  reply, count = index.parent(_conversation(*messages, tools=tools), previous)
  return (reply.call_id if reply else '', count)


def test_the_longest_conversation_that_ends_with_a_reply_is_continued():
  longer = (*START, assistant('a'), user('v'))
  index = _index(
    _reply('one', _conversation(*START), assistant('a')), _reply('two', _conversation(*longer), assistant('b'))
  )
  assert _match(index, *START) == ('', 0)
  assert _match(index, *START, assistant('a')) == ('one', 3)
  assert _match(index, *START, assistant('a'), user('w')) == ('one', 3)
  assert _match(index, *longer, assistant('b'), user('w')) == ('two', 5)
  assert _match(index, *longer, assistant('c'), user('w')) == ('one', 3)
  assert _match(index, system('t'), *longer[1:], assistant('b')) == ('', 0)
  assert _match(ReplyIndex(), *START) == ('', 0)


def test_a_reply_counts_only_under_its_tools():
  index = _index(_reply('one', _conversation(*START, tools=('look',)), assistant('a')))
  whole = (*START, assistant('a'), user('v'))
  assert _match(index, *whole, tools=('look',)) == ('one', 3)
  assert _match(index, *whole) == ('', 0)
  assert index.sampled_otherwise(_conversation(*whole), 0)
  assert not index.sampled_otherwise(_conversation(*whole), 3)


def test_all_forms_of_a_reply_are_one():
  index = _index(_reply('one', _conversation(*START), assistant('<think>a'), assistant('a')))
  second = (*START, assistant('a'), user('v'))
  index.add(_reply('two', _conversation(*second), assistant('<think>b'), assistant('b')))
  mixed = (*START, assistant('<think>a'), user('v'), assistant('b'))
  assert _match(index, *mixed) == ('two', 5) and _match(index, *second, assistant('<think>b')) == ('two', 5)


def test_of_replies_that_look_the_same_ids_of_tools_decide_then_the_named_call_then_the_order():
  at = _conversation(*START)
  index = _index(
    _reply('late', at, assistant('a', 'x'), tool_ids=('x',), request=2),
    _reply('early', at, assistant('a', 'y'), tool_ids=('y',), request=1),
    _reply('second choice', at, assistant('a', 'z'), tool_ids=('z',), request=2, choice=1),
  )
  assert _match(index, *START, assistant('a', 'y'), previous='late') == ('early', 3)
  assert _match(index, *START, assistant('a', 'z')) == ('second choice', 3)
  assert _match(index, *START, assistant('a', '?'), previous='early') == ('early', 3)
  assert _match(index, *START, assistant('a', '?')) == ('late', 3)


def test_ids_of_earlier_tool_calls_decide_between_replies_without_any():
  first, second = ((*START, assistant('a', i), user('v')) for i in 'xy')
  index = _index(
    _reply('of x', _conversation(*first), assistant('b')),
    _reply('of y', _conversation(*second), assistant('b'), request=1),
  )
  assert _match(index, *first, assistant('b'), user('w')) == ('of x', 5)
  assert _match(index, *second, assistant('b'), user('w')) == ('of y', 5)


def test_an_edited_history_holds_a_reply_elsewhere_or_something_else_in_its_place():
  longer = (*START, assistant('a'), user('v'))
  index = _index(
    _reply('one', _conversation(*START), assistant('a')), _reply('two', _conversation(*longer), assistant('b'))
  )
  edits = [
    (system('s'), user('other'), assistant('a'), user('v')),  # an earlier message
    (*START, assistant('other'), user('v')),  # the reply
    (*START, user('again')),  # the reply is left out
    (system('s'), user('v'), assistant('b'), user('w')),  # the oldest turn is left out
  ]
  assert all(index.edited(_conversation(*messages), 0) for messages in edits)
  assert index.edited(_conversation(*longer, assistant('other'), user('w')), 3)
  others = [(system('t'), user('u')), (system('s'), user('x')), (system('s'), user('x'), assistant('shown'), user('y'))]
  assert not any(index.edited(_conversation(*messages), 0) for messages in others)
  assert not index.edited(_conversation(*START, assistant('a'), user('w')), 3)
  # The same prompts once more.
  assert not index.edited(_conversation(*START), 0) and not index.edited(_conversation(*longer), 3)
