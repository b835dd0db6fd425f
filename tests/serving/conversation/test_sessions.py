"""Rows of an attempt's calls: ids that were fed and sampled, each sampled token once, whatever the client sends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.models import presets
from ragen_jax.serving.conversation.sessions import NEW_ROW_CAUSES, Session
from ragen_jax.serving.types import Finish
from tests.support.calls import (
  PARAMS,
  SAMPLED,
  STOP,
  Agent,
  CharacterFormat,
  Message,
  assistant,
  decode,
  encode,
  generated,
  system,
  user,
)

FORMAT = CharacterFormat()
START = (system('s'), user('u'))


def rows(calls):
  """The ids of each row, as the engine has them."""
  found = {}
  for call in calls:
    if call.generated.finish != Finish.ABORTED:
      found[call.row] = found.get(call.row, ()) + call.context + call.generated.ids
  return found


# -- one conversation --------------------------------------------------------------------------------------------------


def test_a_conversation_is_one_row_of_the_ids_that_were_sampled():
  agent, messages, whole = Agent(), list(START), ()
  for turn in range(3):
    reply = generated(f'reply {turn}', split=0b10110)
    plan, call = agent.call(*messages, reply=reply)
    assert (plan.row, plan.cause) == (0, '') and call.new_row_cause == ''
    assert plan.prompt == whole + plan.context and plan.parent == ('' if not turn else f'call {turn}')
    whole = plan.prompt + reply.ids
    messages += [assistant(reply.text), user(f'turn {turn}')]
  assert rows(agent.session.calls) == {0: whole}
  assert decode(plan.prompt) == decode(FORMAT.render(messages[:-2], (), None))
  assert sum(i >= SAMPLED for i in whole) > 5


def test_the_row_equals_that_of_the_built_in_rollout():
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))

  class Plain(CharacterFormat):
    stop_id = tokenizer.stop_ids[0]

    def render(self, messages, tools, options):
      written = [(m.role, m.text) for m in messages]
      return tokenizer.encode(tokenizer.before_reply(written, '', first=True))

    def following(self, messages, tools, options, *, closed):
      written = [(m.role, m.text) for m in messages]
      return tokenizer.encode(('' if closed else '<|im_end|>') + tokenizer.before_reply(written, '', first=False))

  agent = Agent(Session('attempt', Plain()))
  replies = [(*tokenizer.encode('Left'), tokenizer.stop_ids[0]), tokenizer.encode('Up or'), tokenizer.encode('?')]
  expected = tokenizer.encode_segments(tokenizer.opening('Play.', 'board 0', '')).ids
  messages = [system('Play.'), user('board 0')]
  for turn, ids in enumerate(replies):
    text = tokenizer.decode([i for i in ids if i not in tokenizer.stop_ids])
    reply = dataclasses.replace(generated('x' * len(ids)), ids=tuple(ids), text=text)
    plan, _ = agent.call(*messages, reply=reply)
    assert plan.prompt == expected and plan.row == 0
    closed = ids[-1] == tokenizer.stop_ids[0]
    following = tokenizer.encode_segments(tokenizer.following(f'board {turn + 1}', '', closed=closed)).ids
    expected += tuple(ids) + following
    messages += [assistant(text), user(f'board {turn + 1}')]


@pytest.mark.parametrize(
  'reply', [generated('cut', finish=Finish.LENGTH), generated('cut', behind='STOP'), generated('whole')]
)
def test_a_reply_that_was_cut_keeps_its_ids_and_is_closed_as_context(reply):
  agent = Agent()
  first, _ = agent.call(*START, reply=reply)
  plan, _ = agent.call(*START, assistant(reply.text), user('v'))
  closing = () if reply.ids[-1] == STOP else (STOP,)
  assert plan.row == 0 and plan.prompt[: len(first.prompt + reply.ids)] == first.prompt + reply.ids
  assert plan.context == closing + encode(f'\n[user]v{chr(STOP)}\n[assistant]')


def test_a_reply_is_known_with_and_without_its_forced_prefix():
  for sent in ('<think>a', 'a'):
    agent = Agent()
    agent.call(*START, reply='a', forms=(assistant('<think>a'), assistant('a')))
    plan, _ = agent.call(*START, assistant(sent), user('v'))
    assert (plan.row, plan.parent) == (0, 'call 1')
    assert agent.session.conversation('call 1') == FORMAT.canonical((*START, assistant('<think>a')))


def test_ids_extend_a_row_and_a_prompt_that_equals_a_row_continues_its_reply():
  agent, session = Agent(), None
  session = agent.session
  (first,) = session.plan_ids(encode('abc'), agent='', digest='', choices=1)
  session.commit(first, generated('d', finish=Finish.LENGTH), call_id='1', replies=(), params=PARAMS, trained=True)
  (second,) = session.plan_ids(encode('abcd'), agent='', digest='', choices=1)
  assert (second.row, second.context, second.parent, second.cause) == (0, (), '1', '')
  session.commit(second, generated('e'), call_id='2', replies=(), params=PARAMS, trained=True)
  (third,) = session.plan_ids((*encode('abcde'), STOP, 5), agent='', digest='', choices=1)
  assert (third.row, third.context, third.parent) == (0, (5,), '2')
  (fork,) = session.plan_ids(encode('abcdx'), agent='', digest='', choices=1)
  assert (fork.row, fork.context, fork.cause, fork.parent) == (1, encode('abcdx'), 'fork', '1')
  (other,) = session.plan_ids(encode('x'), agent='', digest='', choices=1)
  assert (other.row, other.cause, other.parent) == (2, 'conversation', '')
  assert session.conversation('1') == ()


# -- new rows ----------------------------------------------------------------------------------------------------------


def _two_turns(**request):
  agent = Agent()
  agent.call(*START, reply='a', **request)
  agent.call(*START, assistant('a'), user('v'), reply='b', **request)
  return agent, (*START, assistant('a'), user('v'), assistant('b'))


def test_a_call_that_continues_an_earlier_reply_is_a_fork_and_holds_the_reply_as_context():
  agent, _ = _two_turns()
  plan, call = agent.call(*START, assistant('a'), user('w'), reply='c')
  own = rows(agent.session.calls)
  first = agent.session.calls[0]
  start = first.context + first.generated.ids
  assert (plan.row, plan.cause, plan.parent) == (1, 'fork', 'call 1')
  assert call.context[: len(start)] == start == own[0][: len(start)]
  # Both branches go on in their rows.
  assert agent.call(*START, assistant('a'), user('w'), assistant('c'), user('x'))[0].row == 1
  assert agent.call(*START, assistant('a'), user('v'), assistant('b'), user('x'))[0].row == 0


def test_the_deepest_row_is_extended():
  agent = Agent()
  agent.call(*START, reply='a')
  agent.call(*START, assistant('a'), user('v'), reply='b')
  agent.call(*START, reply='a')  # the same ids once more, as another sample
  plan, _ = agent.call(*START, assistant('a'), user('v'), assistant('b'), user('w'), reply='c')
  assert plan.row == 0
  plan, _ = agent.call(*START, assistant('a'), user('v'), assistant('b'), user('x'), reply='c')
  assert plan.row == 1  # it begins with all ids of row 1, though its replies were sampled in row 0
  assert agent.session.calls[2].new_row_cause == 'repeated'


def test_identical_calls_are_new_samples_in_new_rows():
  agent = Agent()
  plans = [agent.call(*START, reply='a')[0] for _ in range(3)]
  assert [(p.row, p.cause) for p in plans] == [(0, ''), (1, 'repeated'), (2, 'repeated')]
  assert len({p.prompt for p in plans}) == 1


def test_of_several_choices_the_first_extends_the_row():
  agent = Agent()
  agent.call(*START, reply='a')
  plans = agent.plan(*START, assistant('a'), user('v'), choices=3)
  assert [(p.row, p.cause, p.choice) for p in plans] == [(0, '', 0), (1, 'repeated', 1), (2, 'repeated', 2)]
  assert plans[0].prompt == plans[1].prompt == plans[1].context == plans[2].context
  for plan, text in reversed(list(zip(plans, 'xyz', strict=True))):
    agent.commit(plan, generated(text))
  for text, row in (('x', 0), ('y', 1), ('z', 2)):
    assert agent.call(*START, assistant('a'), user('v'), assistant(text), user('w'))[0].row == row


def test_calls_that_run_at_the_same_time_do_not_share_a_row():
  agent = Agent()
  agent.call(*START, reply='a')
  (first,), (second,) = (agent.plan(*START, assistant('a'), user(text)) for text in 'vw')
  assert [(p.row, p.cause) for p in (first, second)] == [(0, ''), (1, 'parallel')]
  agent.commit(second, generated('c'))
  agent.commit(first, generated('b'))
  own = rows(agent.session.calls)
  assert own[0] == first.prompt + generated('b').ids and own[1] == second.prompt + generated('c').ids


def test_a_row_is_free_again_after_a_release_and_after_an_abort():
  agent = Agent()
  agent.call(*START, reply='a')
  go_on = (*START, assistant('a'), user('v'))
  (plan,) = agent.plan(*go_on)
  agent.session.release(plan)
  agent.session.release(plan)
  with pytest.raises(ValueError, match='call 2 is not reserved'):
    agent.session.commit(plan, generated('b'), call_id='call 2', replies=(), params=PARAMS, trained=True)
  (again,) = agent.plan(*go_on)
  assert (again.row, again.prompt, again.aborted) == (0, plan.prompt, 0)
  call = agent.commit(again, generated('b', finish=Finish.ABORTED))
  assert (call.row, call.generated.finish) == (0, 'aborted')
  (third,) = agent.plan(*go_on)
  assert (third.row, third.cause, third.prompt, third.aborted) == (0, '', plan.prompt, 1)
  reloaded = Session.from_calls('attempt', FORMAT, agent.session.calls)
  assert Agent(reloaded).plan(*go_on)[0].aborted == 1
  # What the client saw of the aborted reply was not sampled in any row.
  (fourth,) = agent.plan(*go_on, assistant('b'), user('w'))
  assert fourth.parent == 'call 1' and fourth.cause == 'parallel'


def test_an_aborted_first_call_leaves_the_first_row_to_the_next():
  agent = Agent()
  (plan,) = agent.plan(*START)
  agent.commit(plan, generated('a', finish=Finish.ABORTED))
  plan, call = agent.call(*START, reply='a')
  assert (plan.row, plan.cause, call.index) == (0, '', 1) and rows(agent.session.calls) == {
    0: plan.prompt + call.generated.ids
  }


def _thoughts():
  agent = Agent()
  agent.call(*START, reply=generated('<think>t</think>a', split=1), options='forgets')
  return agent.call(*START, assistant('<think>t</think>a'), user('v'), options='forgets')


def _earlier_thoughts():
  """The thought is not in the last reply, but in one that it continues."""
  agent = Agent()
  agent.call(*START, reply=generated('<think>t</think>a', split=1), options='forgets')
  messages = (*START, assistant('<think>t</think>a'), Message('tool', 'seen'))
  assert agent.call(*messages, reply=generated('b', split=0), options='forgets')[0].row == 0
  return agent.call(*messages, assistant('b'), user('v'), options='forgets')


def _template():
  agent = Agent()
  agent.call(*START, reply=generated('a', split=1), options='forgets')
  return agent.call(*START, assistant('a'), user('v'), options='forgets')


def _tools():
  agent, messages = _two_turns(tools=('look',))
  return agent.call(*messages, user('w'))


def _edited():
  agent, messages = _two_turns()
  return agent.call(messages[0], user('other'), *messages[2:], user('w'))


def _sub_agent():
  agent, _ = _two_turns()
  return agent.call(system('t'), user('u'), agent='helper')


def _conversation():
  agent, _ = _two_turns()
  return agent.call(system('t'), user('u'))


@pytest.mark.parametrize(
  ('cause', 'make'),
  [
    ('thinking', _thoughts), ('thinking', _earlier_thoughts), ('template', _template), ('tools_changed', _tools),
    ('edited_history', _edited), ('sub_agent', _sub_agent), ('conversation', _conversation),
  ],
)  # fmt: skip
def test_causes_of_new_rows_that_are_written_anew(cause, make):
  plan, call = make()
  assert plan.cause == call.new_row_cause == cause and cause in NEW_ROW_CAUSES
  assert plan.row == 1 and plan.context == plan.prompt
  assert all(i < SAMPLED for i in plan.prompt)


def test_a_prompt_that_is_written_anew_extends_the_row_whose_ids_it_begins_with():
  agent = Agent()
  agent.call(*START, reply='a', options='forgets')
  plan, _ = agent.call(*START, assistant('a'), user('v'), options='forgets')
  assert (plan.row, plan.cause) == (0, '')


def test_a_call_with_the_tools_of_an_earlier_one_continues_it_and_holds_what_was_said_without_them():
  agent, messages = _two_turns(tools=('look',))
  without = (*messages, user('sum up'))
  assert agent.call(*without, reply=generated('c', split=1))[0].cause == 'tools_changed'
  plan, _ = agent.call(*without, assistant('c'), user('w'), tools=('look',))
  assert (plan.row, plan.parent) == (0, 'call 2')
  assert plan.context == encode(f'\n[user]sum up{chr(STOP)}\n[assistant]c{chr(STOP)}\n[user]w{chr(STOP)}\n[assistant]')


def test_the_ids_of_a_reply_that_looks_like_another_are_told_by_its_tool_calls():
  agent = Agent()
  (one,), (two,) = agent.plan(*START), agent.plan(*START)
  replies = generated('a', split=0), generated('a', split=1)
  for plan, reply, tool in zip((one, two), replies, 'xy', strict=True):
    agent.commit(plan, reply, assistant('a', tool))
  for tool, reply, row in zip('xy', replies, (0, 1), strict=True):
    plan, _ = agent.call(*START, assistant('a', tool), user(f'result {tool}'))
    assert plan.row == row and plan.prompt[: len(one.prompt + reply.ids)] == one.prompt + reply.ids


# -- any client --------------------------------------------------------------------------------------------------------

REPLIES = ('ok', 'no', '<think>t</think>ok')
OPERATIONS = ('go on', 'fork', 'edit', 'drop', 'repeat', 'choices', 'parallel', 'abort', 'release', 'new', 'lose ids')


def _without_ids(message):
  return dataclasses.replace(message, tool_calls=tuple(dataclasses.replace(call, id='') for call in message.tool_calls))


@dataclasses.dataclass
class Client:
  """A client with several conversations, and what it knows of the replies that it got."""

  agent: Agent
  fed: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # call id -> prompt
  got: list[tuple[tuple[Message, ...], Message, str]] = dataclasses.field(default_factory=list)

  def play(self, operation, where, reply, cut):
    """Makes the calls of an operation."""
    messages, answer, _ = self.got[where % len(self.got)] if self.got else (START, assistant('none'), '')
    whole = (*messages, answer, user(f'v{where % 2}'))
    text, tools = REPLIES[reply % len(REPLIES)], ('look',) * (where % 5 == 0)
    choices = 2 if operation == 'choices' else 1
    calls = {
      'go on': [whole], 'choices': [whole], 'abort': [whole], 'release': [whole],
      'fork': [(*messages, answer, user('fork'))],
      'edit': [(messages[0], user('edited'), *whole[2:])],
      'drop': [whole[-3:]],
      'repeat': [messages],
      'parallel': [whole, (*whole[:-1], user('p')), messages],
      'new': [(system(f's{where % 3}'), user('u'))],
      'lose ids': [tuple(map(_without_ids, whole))],
    }[operation]  # fmt: skip
    session, planned = self.agent.session, []
    for own in calls:
      before = rows(session.calls)
      reserved = {plan.row for _, plan in planned}
      options = 'forgets' if where % 7 == 0 else None
      for plan in self.agent.plan(*own, tools=tools, options=options, choices=choices):
        _check(plan, before, reserved, FORMAT.render(own, tools, options))
        reserved.add(plan.row)
        planned.append((own, plan))
    for i, (own, plan) in reversed(list(enumerate(planned))):
      if operation == 'release':
        session.release(plan)
        continue
      finish = Finish.ABORTED if operation == 'abort' else Finish.LENGTH if cut % 3 == 0 else Finish.STOP
      name = f'call {len(self.agent.session.calls) + 1}'
      message = assistant(text, *([f'id of {name}'] if cut % 2 else []))
      sampled = generated(text + 'look' * len(message.tool_calls), split=cut + i, finish=finish)
      call = self.agent.commit(plan, sampled, message)
      self.fed[name] = plan.prompt
      if call.generated.finish != Finish.ABORTED:
        self.got.append((own, message, name))


def _check(plan, before, reserved, rendered):
  """A plan against the rows before it, by comparison of all ids."""
  free = [r for r, ids in before.items() if r not in reserved and plan.prompt[: len(ids)] == ids]
  if free:
    depth = len(before[plan.row])
    assert plan.row in free and depth == max(len(before[r]) for r in free) and plan.cause == ''
    assert plan.context == plan.prompt[depth:]
  else:
    assert plan.row not in before and plan.row not in reserved and plan.context == plan.prompt
    assert plan.cause in NEW_ROW_CAUSES if before or reserved else plan.cause == ''
  # No matter which ids: the text is that of the template.
  assert decode(plan.prompt) == decode(rendered)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40), st.integers(0, 5), st.integers(0, 30)), max_size=14
  )
)
@pytest.mark.slow
def test_whatever_a_client_sends_rows_are_what_was_fed_and_every_sampled_token_is_in_one_place(operations):
  agent = Agent()
  client = Client(agent)
  for operation in operations:
    client.play(*operation)
  calls, session = agent.session.calls, agent.session
  assert [call.index for call in calls] == list(range(len(calls)))
  whole, ends, places = rows(calls), {}, set()
  for call in calls:
    start = ends.get(call.row, 0)
    end = start + len(call.context)
    assert call.generated.finish == Finish.ABORTED or whole[call.row][:end] == client.fed[call.call_id]
    if call.generated.finish != Finish.ABORTED:
      ends[call.row] = end + len(call.generated.ids)
      assert whole[call.row][end : ends[call.row]] == call.generated.ids
      places |= {(call.row, column) for column in range(end, ends[call.row])}
  sampled = sum(len(call.generated.ids) for call in calls if call.generated.finish != Finish.ABORTED)
  assert len(places) == sampled and ends == {row: len(ids) for row, ids in whole.items()}
  # A conversation that goes on holds the ids of its reply, even where another looks the same.
  for messages, message, name in client.got:
    call = next(c for c in calls if c.call_id == name)
    if message.tool_calls and call.generated.finish == Finish.STOP:
      for tools in ((), ('look',)):
        (plan,) = agent.plan(*messages, message, user('last'), tools=tools)
        if plan.parent == name:
          ids = client.fed[name] + call.generated.ids
          assert plan.prompt[: len(ids)] == ids
        session.release(plan)
  _check_restart(agent, client)


def _check_restart(agent, client):
  """A session that is read from the store goes on as the one that was never stopped."""
  stored = sorted(agent.session.calls, key=lambda call: np.sin(call.index))
  other = Agent(Session.from_calls('attempt', FORMAT, stored))
  probes = [(*messages, message, user('x')) for messages, message, _ in client.got] + [START, (system('s'), user('y'))]
  for messages in probes:
    for tools in ((), ('look',)):
      for previous in ('', 'call 1'):
        pair = [a.plan(*messages, tools=tools, choices=2, previous=previous) for a in (agent, other)]
        first, second = ([dataclasses.asdict(p) | {'request': 0} for p in plans] for plans in pair)
        assert first == second
        for a, plans in zip((agent, other), pair, strict=True):
          for plan in plans:
            a.session.release(plan)
  for _, _, name in client.got:
    assert agent.session.conversation(name) == other.session.conversation(name)


def test_after_a_restart_the_latest_of_equal_replies_is_continued():
  agent = Agent()
  for split in (0, 1):
    agent.call(*START, reply=generated('ab', split=split))
  other = Agent(Session.from_calls('attempt', FORMAT, agent.session.calls))
  other.call(*START, reply=generated('ab', split=2))
  assert other.plan(*START, assistant('ab'), user('v'))[0].row == 2


def test_a_conversation_is_told_from_the_stored_calls():
  agent, messages = _two_turns()
  agent.call(*messages, user('w'), reply='c', forms=(assistant('c', 'id'),))
  expected = FORMAT.canonical((*messages, user('w'), assistant('c')))[:-1]
  told = Session.from_calls('attempt', FORMAT, agent.session.calls).conversation('call 3')
  assert told[:-1] == expected and told[-1] == FORMAT.canonical([assistant('c', 'id')])[0]
  # A call stores only what its conversation adds.
  assert len(agent.session.calls[2].messages) < len(agent.session.calls[1].messages) + 40
  with pytest.raises(KeyError):
    agent.session.conversation('other')
