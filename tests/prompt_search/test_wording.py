"""Requests to the critic are bounded, nothing quoted can pass for a part of them, and replies are read strictly."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.prompt_search import wording
from ragen_jax.prompt_search.wording import Failure

_SPACES = '\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\t |'
_LONG = st.one_of(st.integers(0, 9000).map('x'.__mul__), st.integers(0, 900).map('\n'.__mul__))
texts = st.text(st.one_of(st.sampled_from(_SPACES), st.sampled_from(string.ascii_letters + '<>/{}é')), max_size=300)


def _own(chat) -> list[str]:
  """The lines of a request that are not quoted."""
  return [line for line in chat[-1]['content'].splitlines() if not line.startswith('| ')]


def _failure(text, score=0.0, turns=1):
  return Failure(text, score, text, ((text, text),) * turns)


@settings(deadline=None, max_examples=60)
@given(texts, texts)
def test_quoted_texts_do_not_leave_their_quotes(foreign, other):
  plain = _own(wording.critique_request('p', [_failure('t')], 8000))
  assert _own(wording.critique_request(foreign, [_failure('t')], 8000)) == plain
  assert _own(wording.critique_request(foreign, [_failure(other or 'e')], 8000)) == plain
  plain = _own(wording.edit_request('p', 'c', 100, 8000))
  no_names = foreign.replace('{', '(')
  assert _own(wording.edit_request(no_names, other, 100, 8000)) == plain


@settings(deadline=None, max_examples=60)
@given(st.one_of(texts, _LONG), st.integers(100, 700))
def test_an_excerpt_is_bounded_and_quoted(text, most):
  shown = wording.excerpt(text, most)
  assert len(shown) <= most and shown
  outside = [line for line in shown.splitlines() if not line.startswith('| ') and line != '|']
  assert len(outside) <= 1 and (not outside or 'left out' in outside[0])
  if len(wording.quote(text)) <= most:
    assert shown == wording.quote(text)
  else:
    assert shown.startswith(wording.quote(text)[:20]) and shown.endswith(wording.quote(text)[-20:])


def test_the_number_of_characters_that_are_left_out_is_right():
  shown = wording.excerpt('x' * 5000, 200)
  assert f'[{5002 - (shown.count("x") + 2)} characters' in shown


@pytest.mark.parametrize('shown_chars', [1000, 3500, 20_000])
@pytest.mark.parametrize('count', [1, 3, 50])
@pytest.mark.parametrize('turns', [0, 1, 2, 40])
def test_attempts_are_bounded(shown_chars, count, turns):
  failures = [_failure('y' * 4000, turns=turns) for _ in range(count)]
  empty = len(wording.critique_request('p', [], 1000)[-1]['content'])
  text = wording.critique_request('p', failures, shown_chars)[-1]['content']
  assert len(text) - empty <= shown_chars
  assert f'Attempt 1 of {min(count, shown_chars // 1000)}:' in text


def test_the_worst_attempts_are_shown_with_what_happened():
  failures = [
    Failure(f'task {i}', float(i), 'it broke' if i == 1 else '', ((f'read {i}', f'said {i}'),)) for i in range(4)
  ]
  text = wording.critique_request('Play well.\nWin.', failures[::-1], 2000)[-1]['content']
  assert '| Play well.\n| Win.\n' in text
  assert text.index('| task 0') < text.index('| read 0') < text.index('| said 0') < text.index('| task 1')
  assert 'task 2' not in text and 'Its score is 1.' in text and text.count('| it broke') == 1


def test_of_many_turns_the_first_and_the_last_are_shown():
  turns = tuple((f'read {i} ' + 'z' * 40, f'said {i}.') for i in range(40))
  text = wording.critique_request('p', [Failure('t', 0.0, '', turns)], 1500)[-1]['content']
  told = [i for i in range(40) if f'said {i}.' in text]
  assert told[0] == 0 and told[-1] == 39 and 3 < len(told) < 30
  assert told[1:] == list(range(told[1], 40)) and f'({40 - len(told)} turns are left out here.)' in text


def test_an_edit_names_the_placeholders_and_the_length():
  text = wording.edit_request('Do {task} for {who_2}; {not one}, {}', 'Bad.', 77, 1000)[-1]['content']
  assert 'replaces {task}, {who_2}: keep' in text and 'at most 77 characters' in text and '\n| Bad.\n' in text
  assert 'replaces' not in wording.edit_request('none', 'Bad.', 77, 1000)[-1]['content']


@pytest.mark.parametrize(
  ('reply', 'prompt'),
  [
    ('<prompt>a</prompt>', 'a'),
    ('Here:\n<prompt>\n a\nb \n</prompt>\nGood luck.', 'a\nb'),
    ('<prompt>use <prompt>x</prompt> here</prompt>', 'use <prompt>x</prompt> here'),
    ('<think><prompt>no</prompt></think><prompt>yes</prompt>', 'yes'),
    ('<think><prompt>no</prompt></think>', None),
    ('<prompt></prompt>', ''),
    ('<prompt>a', None),
    ('a', None),
    ('', None),
  ],
)
def test_reading_a_prompt(reply, prompt):
  assert wording.read_prompt(reply) == prompt


def test_placeholders():
  assert wording.placeholders('{a} {b_1} {a} {1} {} { c } {"json": 2}') == {'{a}', '{b_1}'}


@pytest.mark.parametrize(
  ('reply', 'left'),
  [
    (' <think>hm</think>\n ok ', 'ok'),
    ('<think>hm</think> ok', 'ok'),
    ('<think>hm</think>\n\nBegin with </think>.', 'Begin with </think>.'),
    ('hm\n</think>\n\nok', 'ok'),  # the template has written the beginning
    ('hm</think> <prompt>a</prompt>', '<prompt>a</prompt>'),
    ('It does not say that </think> must come first. It should.',) * 2,
    ('Write <think> and\n</think>\nfirst.',) * 2,
    ('ok',) * 2,
    ('',) * 2,
  ],
)
def test_thoughts_are_left_out(reply, left):
  assert wording.without_thought(reply) == left


@pytest.mark.parametrize('before', ['', '<think>hm</think>', 'hm\n</think>\n', '<think><prompt>a</prompt></think>\n'])
@pytest.mark.parametrize(
  'prompt', ['Write <think>, </think> and the answer.', 'Think.\n<think>\n</think>\nThen answer.', 'a']
)
def test_a_new_prompt_may_name_the_tags_of_thoughts(before, prompt):
  assert wording.read_prompt(f'{before}<prompt>{prompt}</prompt>') == prompt
