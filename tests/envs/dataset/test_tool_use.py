"""Calls in answers: their reading, budgets, what the policy is told, and the options of the config."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from ragen_jax.envs.dataset.tool_use import Final, Told, Toolbox, make_toolbox, read_call, write_call
from ragen_jax.envs.dataset.tools import FunctionTool, Tool, WrongArguments
from ragen_jax.utils.threads import Fault
from tests.support import user_tools
from tests.support.environments import raises_one_line
from tests.support.hostile import texts
from tests.support.user_tools import TOOLS

NAMES = ('search', 'book', 'finish')


def box(*names, **options):
  return make_toolbox(tuple(f'{TOOLS}:{name}' for name in names), options)


# -- reading -----------------------------------------------------------------------------------------------------------


def after_call(argument):
  """What follows the bracket that closes the call; each pair of brackets is taken away, from the inside."""
  pairs = re.compile(r'\[[^\[\]]*\]')
  while pairs.search(argument):
    argument = pairs.sub(lambda m: '\0' * len(m[0]), argument)
  return argument.partition(']')[2]


def is_several(argument):
  """Whether the argument closes its call and calls a tool after it."""
  rest = argument[len(argument) - len(after_call(argument)) :]
  words = [re.search(r'(\w*)\s*$', part) for part in rest.split('[')[:-1]]
  return any(word[1].lower() in NAMES for word in words)


PIECES = st.lists(
  st.sampled_from(['[', ']', '[[', ']]', '\n', ' ', ' || ', 'a', 'é', '日本', '\U0001f642', '{"x": [1]}', '\\'])
  | st.sampled_from(['] search[', ']\nfinish [', '], Book[', '] other[', '[finish] search[x]', 'search'])
  | texts(),
  max_size=6,
).map(''.join)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(NAMES), PIECES)
@example('search', '] search[')
@example('search', '[a] search[b]')
@example('finish', ']]][')
def test_an_argument_comes_back_from_its_call(name, argument):
  answer = write_call(name, argument)
  if is_several(argument):
    with pytest.raises(WrongArguments, match=r'^An answer is one call, and these are several'):
      read_call(answer, NAMES)
  elif not re.search(r'[^\W\0]', after_call(argument)) or read_call(answer, NAMES):
    assert read_call(answer, NAMES) == (name, argument.strip())
    assert read_call(f' \n{name.upper()} {answer.removeprefix(name)}\n', NAMES) == (name, argument.strip())


@pytest.mark.parametrize(
  'text',
  ['', ' ', 'Paris', 'I call search[Paris]', 'search[Paris].', 'search', 'search[Paris', 'search]Paris[', '[Paris]',
   '3[Paris]', 'search: [Paris]', '```search[Paris]```', '<search>Paris</search>',
   'finish[18] or [17]', 'search[x] and then lookup[y]', 'search[a] b]', 'lookup[a] lookup[b]', 'search[a], [b]'],
)  # fmt: skip
def test_what_is_not_one_call_from_its_first_to_its_last_character_is_none(text):
  assert read_call(text, NAMES) is None


def test_a_call_of_another_name_is_read_with_its_name():
  assert read_call('Lookup[a]', NAMES) == ('lookup', 'a')


@settings(deadline=None, max_examples=100)
@given(texts())
def test_no_text_breaks_the_reader(text):
  use = box('shout').open(1)
  (outcome,) = use.step([0], [text])
  call = text.strip().lower().startswith(('shout', 'finish'))
  assert call or (isinstance(outcome, Told) and not outcome.valid)


@pytest.mark.parametrize(
  'text',
  ['finish[18] or finish[17]', 'search[x] and then finish[y]', 'search[x]; then: SEARCH [y]', 'finish[(a] or finish[b]',
   'search[[a]] no finish[b]', 'finish[a] lookup[b] finish[c]'],
)  # fmt: skip
def test_several_calls_with_words_between_them_are_no_call(text):
  with pytest.raises(WrongArguments, match=r'^An answer is one call, and these are several'):
    read_call(text, NAMES)


@pytest.mark.parametrize(
  'argument',
  [
    'a [b] c',
    '[a] or [b]',
    '(0, 1] or [2, 3)',
    '[0, 1)',
    '(0, 1]',
    'x[i][j] = y[k]',
    'a) first',
    'a]',
    'a] ].',
    '[[a] b',
  ],
)
def test_brackets_may_stand_in_an_argument(argument):
  assert read_call(f'finish[{argument}]', NAMES) == ('finish', argument)


def test_a_long_name_is_cut():
  (outcome,) = box('shout').open(1).step([0], [f'{"x" * 5000}[a]'])
  assert outcome.text == f"There is no tool '{'x' * 34} [cut]'. Allowed: shout[text], finish[answer]."


# -- what the policy is told -------------------------------------------------------------------------------------------


def test_the_rules_follow_the_tools_and_their_budgets():
  assert box('shout', 'clock', shout={'budget': 3}, clock={'budget': 1}).rules() == (
    'An answer is one call, written as follows:\n'
    'shout[text] Writes a text in capitals; at most 3 times in an episode.\n'
    'clock[] Tells the time; once in an episode.\n'
    'finish[answer] gives your answer and ends the episode.'
  )
  free = box('zone', finish={'free_text_is_answer': True})
  assert free.rules('gives an answer').splitlines()[1:] == [
    'zone[name] Tells the time in a zone.',
    'finish[answer] gives an answer.',
    'Any other text is taken for your answer.',
  ]


NO_CALLS = {'invalid_calls': 0.0, 'shout_calls': 0.0, 'clock_calls': 0.0}


def test_each_answer_has_its_outcome():
  use = box('shout', 'clock').open(9)
  answers = ['shout[a]', 'finish[ a [b] ]', 'clock[]', 'Paris', 'lookup[a]', 'shout[]', 'finish[]', 'shout[no]', ' ']
  allowed = 'Allowed: shout[text], clock[], finish[answer].'
  invalid = NO_CALLS | {'invalid_calls': 1.0}
  assert use.step(range(9), answers) == [
    Told('shout: A', True, NO_CALLS | {'shout_calls': 1.0}),
    Final('a [b]', NO_CALLS),
    Told('clock: noon', True, NO_CALLS | {'clock_calls': 1.0}),
    Told(f'This is no call of a tool. {allowed}', False, invalid),
    Told(f"There is no tool 'lookup'. {allowed}", False, invalid),
    Told('The text is empty.', False, invalid),
    Told('The answer is empty.', False, invalid),
    Told('No capitals for "no".', False, invalid | {'shout_calls': 1.0}),
    Told(f'This is no call of a tool. {allowed}', False, invalid),
  ]


def test_free_text_is_an_answer_only_if_the_config_says_so():
  use = box('shout', finish={'free_text_is_answer': True}).open(5)
  none = {'invalid_calls': 0.0, 'shout_calls': 0.0}
  first, other, blank, several, call = use.step(
    range(5), [' Paris\n', 'lookup[a]', ' ', 'shout[a] shout[b]', 'SHOUT [b]']
  )
  assert (first, other) == (Final('Paris', none), Final('lookup[a]', none))
  assert not blank.valid and blank.text.startswith('This is no call of a tool. Allowed: ')
  assert not several.valid and several.text == 'An answer is one call, and these are several.'
  assert call.text == 'shout: B'


def test_a_budget_belongs_to_an_episode_of_a_row():
  use = box('shout', 'untyped', shout={'budget': 2}).open(2)

  def told(row, answer):
    (outcome,) = use.step([row], [answer])
    return outcome.text

  assert told(0, 'shout[a]') == 'shout: A\nCalls of shout left: 1.'
  assert told(0, 'shout[]') == 'The text is empty.'  # mistakes cost nothing of it
  assert told(0, 'untyped[a]') == 'untyped: a'
  assert told(0, 'shout[no]') == 'No capitals for "no".\nCalls of shout left: 0.'
  spent = 'Allowed: untyped[text], finish[answer].'
  assert told(0, 'shout[c]') == f'No call of shout is left. {spent}'
  assert told(0, 'Paris') == f'This is no call of a tool. {spent}'
  assert told(1, 'shout[c]') == 'shout: C\nCalls of shout left: 1.'
  use.reset([0])
  assert told(0, 'shout[d]') == 'shout: D\nCalls of shout left: 1.'
  assert told(1, 'shout[d]') == 'shout: D\nCalls of shout left: 0.'


def test_what_is_over_budget_or_wrong_is_not_called(monkeypatch):
  monkeypatch.setattr(user_tools, 'CALLED', [])
  use = box('untyped', untyped={'budget': 1}).open(3)
  use.step([0, 1, 2], ['untyped[a]', 'untyped[]', 'x'])
  use.step([0, 1], ['untyped[b]', 'untyped[c]'])
  assert user_tools.CALLED == ['a', 'c']


def test_long_results_are_cut_before_the_line_about_the_budget():
  (outcome,) = box('shout', shout={'budget': 5, 'max_chars': 100}).open(1).step([0], [f'shout[{"x" * 500}]'])
  text, line = outcome.text.split('\n')
  assert len(text) == 100 and text.endswith('X [cut]') and line == 'Calls of shout left: 4.'


class Counting(Tool):
  """Answers with the size of its batch; raises where it is told to."""

  name = 'counting'
  help = 'Counts'
  schema = {'type': 'object', 'properties': {'text': {'type': 'string'}}, 'required': ['text']}  # noqa: RUF012

  def call(self, batch):
    if any(arguments['text'] == 'raise' for arguments in batch):
      raise OSError('no such thing')
    return [Fault('counting failed') if x['text'] == 'fail' else f'{x["text"]} of {len(batch)}' for x in batch]


def test_all_calls_of_a_tool_are_one_batch_and_rows_keep_their_order():
  use = Toolbox([FunctionTool(function=f'{TOOLS}:shout'), Counting()]).open(8)
  outcomes = use.step([7, 2, 5, 0, 3], ['counting[a]', 'shout[b]', 'finish[c]', 'counting[fail]', 'counting[d]'])
  assert [getattr(x, 'text', x) for x in outcomes] == [
    'a of 3', 'shout: B', Final('c', {'invalid_calls': 0.0, 'shout_calls': 0.0, 'counting_calls': 0.0}),
    Fault('counting failed'), 'd of 3',
  ]  # fmt: skip


def test_a_tool_that_raises_is_a_fault_of_all_its_rows_and_of_no_other():
  use = Toolbox([FunctionTool(function=f'{TOOLS}:shout'), Counting()]).open(3)
  first, other, second = use.step(range(3), ['counting[raise]', 'shout[b]', 'counting[a]'])
  assert isinstance(first, Fault) and first == second and first.kind == 'counting raised OSError'
  assert other.text == 'shout: B'


# -- options -----------------------------------------------------------------------------------------------------------


def test_tools_come_from_the_names_and_options_of_a_config():
  assert make_toolbox((), {}) is make_toolbox([], ConfigDict({'search': {'retriever': 'mock'}})) is None
  options = ConfigDict({'search': {'retriever': 'mock', 'top_k': 1, 'budget': 4}, 'shout': {'budget': 2}})
  made = make_toolbox(['search', f'{TOOLS}:shout'], options)
  assert list(made.tools) == ['search', 'shout'] and not made.free_text_is_answer
  assert (made.tools['search'].budget, made.tools['search'].top_k, made.tools['shout'].budget) == (4, 1, 2)
  made.check()
  (outcome,) = made.open(1).step([0], ['search[ a \n b ]'])
  assert outcome.text == (
    'Passages for "a b":\n[1] Made-up passage 0\nThis text stands for a passage about a b.\nCalls of search left: 3.'
  )
  make_toolbox([f'{TOOLS}:shout'], options)  # options of a built-in tool that is not used


@pytest.mark.parametrize(
  ('names', 'options', 'message'),
  [
    ('search', {}, "tools='search'; allowed: a tuple of search, functions and MCP servers"),
    ((3,), {}, r'tools=\(3,\); allowed: a tuple of search, functions and MCP servers'),
    (
      ('serach',),
      {},
      "tools: 'serach'; did you mean 'search'. allowed: search, 'package.module:function', 'mcp:COMMAND'",
    ),
    ((f'{TOOLS}:finish',), {}, "tools: two have the name 'finish'; allowed: "),
    ((f'{TOOLS}:shout',) * 2, {}, "tools: two have the name 'shout'; allowed: "),
    ((f'{TOOLS}:shout',), {'shuot': {}}, r"tool_options.shuot: there is no such tool; did you mean 'shout'. allowed: "),
    (
      (f'{TOOLS}:shout',),
      {'shout': {'n': 1}},
      'tool_options.shout: n is no option; allowed: help, budget, ',
    ),
    ((f'{TOOLS}:shout',), {'shout': {'function': 'a:b'}}, 'tool_options.shout: function is no option; allowed: '),
    ((f'{TOOLS}:shout',), {'shout': 3}, 'tool_options: shout=3; allowed: a section of options by name'),
    ((f'{TOOLS}:shout',), 3, 'dataset: tool_options=3; allowed: a section of options by name'),
    ((), {'finish': {'free': True}}, 'tool_options.finish: free is no option; allowed: free_text_is_answer'),
    ((), {'finish': {'free_text_is_answer': 'yes'}}, 'tool_options.finish: free_text_is_answer=.*; allowed: True, Fal'),
    (('search',), {}, "tool_options.search: retriever=''; allowed: 'bm25:PATH.jsonl', "),
  ],
)
def test_wrong_options_are_named_in_one_line(names, options, message):
  with raises_one_line(f'^{message}'):
    make_toolbox(names, options)
