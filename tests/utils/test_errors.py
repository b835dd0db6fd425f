"""Messages of one line, also of values and exceptions that cannot be written."""

from __future__ import annotations

import pytest

from ragen_jax.utils.errors import (
  DiskError,
  Diverged,
  StoreAway,
  UserError,
  describe_error,
  did_you_mean,
  one_line,
  printable,
  short,
)


class _Unwritable:
  def __init__(self, error: BaseException):
    self.error = error

  def __repr__(self):
    raise self.error


class _Own(BaseException):
  """Neither an Exception nor SystemExit."""


class _UnwritableError(Exception):
  def __str__(self):
    raise SystemExit(3)


@pytest.mark.parametrize(
  ('value', 'line'),
  [
    ('a\nb', r"'a\nb'"),
    ({'a': 1}, "{'a': 1}"),
    (_Unwritable(KeyError('x')), '(_Unwritable that cannot be written: KeyError)'),
    (_Unwritable(SystemExit(2)), '(_Unwritable that cannot be written: SystemExit)'),
    (_Unwritable(_Own()), '(_Unwritable that cannot be written: _Own)'),
  ],
)
def test_values_are_written_in_one_line(value, line):
  assert one_line(value) == line


def test_white_space_of_any_writer_becomes_single_spaces():
  assert one_line('  two\n\n  lines\tand\r\ntabs ', str) == 'two lines and tabs'
  assert one_line(3, lambda x: f'{x}\n{x}') == '3 3'


def test_foreign_texts_have_no_control_characters():
  """They would clear a terminal, set its title, or let a line read from right to left."""
  title, clear, reverse = '\x1b]0;title\x07', '\x9b2J', '\u202e'
  assert printable(f'{title}{clear}{reverse}') == '?]0;title??2J?'
  assert one_line(f'a{title}\r\n{clear}b', str) == 'a?]0;title? ?2Jb'
  assert describe_error(ValueError(clear)) == 'ValueError: ?2J'
  for text in ('', 'plain', 'Grüße, 你好, عربي, 😀', '\ufffd'):
    assert printable(text) == one_line(text, str) == text
  assert printable('a\tb\r\nc\ud800', also='\n\t') == 'a\tb?\nc?'


@pytest.mark.parametrize(
  ('name', 'meant'),
  [
    ('smollm2-135m-instruct', 'smollm2-135m'), ('smollm2-135m', 'smollm2-135m'), ('smollm-135m', 'smollm2-135m'),
    ('llama3.2-3b-instruct-lora', 'llama3.2-3b-instruct'), ('smol', None),
  ],
)  # fmt: skip
def test_a_name_with_an_addition_means_the_longest_known_beginning(name, meant):
  known = iter(['llama3.2-3b', 'llama3.2-3b-instruct', 'smollm2-135m', 'smollm2-1.7b'])
  assert did_you_mean(name, known) == (f'did you mean {meant!r}? ' if meant else '')


def test_an_interrupt_is_not_taken_for_a_value_that_cannot_be_written():
  with pytest.raises(KeyboardInterrupt):
    one_line(_Unwritable(KeyboardInterrupt()))


def test_foreign_values_are_cut_before_they_are_written():
  for value in ('x' * 10**7, b'x' * 10**7, bytearray(10**7), ['x' * 400] * 10**6, {i: 'x' * 400 for i in range(99)}):
    assert len(short(value)) <= 300 and '...' in short(value)
  assert short(['a', {'b': (1, None)}]) == "['a', {'b': (1, None)}]"
  assert short(_Unwritable(_Own())) == '(_Unwritable that cannot be written: _Own)'


@pytest.mark.parametrize(
  ('error', 'line'),
  [
    (ValueError('a\n  b'), 'ValueError: a b'),
    (SystemExit(2), 'SystemExit: 2'),
    (KeyError('name'), "KeyError: 'name'"),
    (_UnwritableError(), '_UnwritableError: (_UnwritableError that cannot be written: SystemExit)'),
  ],
)
def test_exceptions_are_described_by_type_and_message(error, line):
  assert describe_error(error) == line


def test_bad_input_and_a_run_that_diverged_have_different_exit_statuses():
  """A queue that starts runs again can tell a wrong command from a run that failed."""
  wrong, everywhere, diverged = UserError('no'), UserError('no', everywhere=True), Diverged('NaN')
  assert len({kind.status for kind in (UserError, Diverged, DiskError, StoreAway)} | {0, 130, 143}) == 7
  assert (wrong.status, wrong.everywhere) == (2, False) and everywhere.everywhere
  assert (diverged.status, diverged.everywhere, str(diverged)) == (1, True, 'NaN') and isinstance(diverged, UserError)
