"""Items of rows: fields, golds, choices, splits and limits, and what is logged about rows that are left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs.dataset.items import load_items
from ragen_jax.envs.dataset.selection import digest
from tests.support.datasets import FUNCTIONS, make, untimed, write_lines
from tests.support.environments import raises_one_line


def items_of(tmp_path, rows, **options):
  return make(path=write_lines(tmp_path / 'q.jsonl', rows), **options).items


def test_fields_are_named_by_the_config(tmp_path):
  rows = [
    {'q': ' Why? ', 'a': 'So.', 's': 'Because.', 'g': 7, 'rest': [1]},
    {'q': 'How?', 'a': 'x', 's': None, 'g': 'b'},
  ]
  fields = {'question': 'q', 'answer': 'a', 'solution': 's', 'group': 'g'}
  first, second = items_of(tmp_path, rows, fields=fields, verifier='exact')
  assert (first.question, first.gold, first.solution, first.id, first.extra) == (
    'Why?', ('So.',), 'Because.', digest('7'), {},
  )  # fmt: skip
  assert (second.solution, second.id) == ('', digest('b'))


def test_without_a_group_an_item_is_its_question(tmp_path):
  a, b, c = items_of(tmp_path, [{'question': q, 'answer': 'x'} for q in ('Why?', ' why? ', 'Why not?')])
  assert a.id == b.id == digest('Why?') != c.id


@pytest.mark.parametrize('group', [None, '', ' ', math.nan])
def test_rows_without_a_group_are_groups_of_their_own(tmp_path, group):
  rows = [{'question': q, 'answer': 'x', 'group': group} for q in ('Why?', 'Why not?')]
  rows += [{'question': 'How?', 'answer': 'x', 'group': g} for g in (0, False, 'None')]
  items = items_of(tmp_path, rows, fields={'group': 'group'})
  assert [item.id for item in items] == [digest(x) for x in ('Why?', 'Why not?', '0', 'False', 'None')]


ROWS = [{'question': 'a?', 'answer': 'x', 'choices': ['x', 'y'], 'solution': 's', 'group': 'g'}]
FIELDS = {name: name for name in ROWS[0]}


@pytest.mark.parametrize(
  ('row', 'options', 'message'),
  [
    ({'prompt': 'a?', 'answer': 'x'}, {}, r"line 2 has no field 'question' \(fields\.question\); its fields are pr"),
    ({'question': 'a?', 'answers': 'x'}, {}, r"line 2 has no field 'answer' .*did you mean 'answers'\? its fields are"),
    ({'question': ' ', 'answer': 'x'}, {}, "line 2: question=' '; allowed: text that is not blank"),
    ({'question': 5, 'answer': 'x'}, {}, 'line 2: question=5; allowed: text'),
    ({'question': 'a?', 'answer': None}, {}, 'line 2: answer=None; allowed: an answer'),
    ({'question': 'a?', 'answer': ''}, {}, "line 2: answer='' is no gold for verifier='exact'; allowed: text th"),
    ({'question': 'a?', 'answer': math.nan}, {}, "line 2: answer=nan is no gold for verifier='exact'; allowed: text"),
    ({'question': 'a?', 'answer': 'six'}, {'verifier': 'number'}, "answer='six' is no gold for verifier='number'; a"),
    ({'question': 'a?', 'answer': 'C'}, {'verifier': 'choice'}, 'fields.choices must name'),
    ({'question': 'a?', 'answer': 'x'}, {'answer_pattern': '#### (.*)$'}, "answer='x' does not match ans"),
    ({'question': 'a?', 'answer': 5}, {'answer_pattern': '(.*)'}, 'answer=5 does not match answer_pattern'),
    ({**ROWS[0], 'solution': [1]}, {'fields': FIELDS}, r'line 2: solution=\[1\]; allowed: text or a n'),
    ({**ROWS[0], 'solution': True}, {'fields': FIELDS}, 'line 2: solution=True; allowed: text or a n'),
    ({**ROWS[0], 'choices': 'xy'}, {'fields': FIELDS}, "line 2: choices='xy'; allowed: a list of 2 to 26 texts"),
    ({**ROWS[0], 'choices': ['x']}, {'fields': FIELDS}, r"line 2: choices=\['x'\]; allowed"),
    ({**ROWS[0], 'choices': ['x', None]}, {'fields': FIELDS}, r'choices=.*allowed'),
    ({**ROWS[0], 'choices': ['x', ' ']}, {'fields': FIELDS}, r'choices=.*allowed'),
    ({**ROWS[0], 'choices': {'text': ['x', 'y'], 'label': ['1', '1']}}, {'fields': FIELDS}, r'choices=.*allowed'),
    ({**ROWS[0], 'choices': {'text': ['x', 'y'], 'label': ['1']}}, {'fields': FIELDS}, r'choices=.*allowed'),
    ({name: ROWS[0][name] for name in ('question', 'answer')}, {'fields': FIELDS}, "line 2 has no field 'solution'"),
  ],
)  # fmt: skip
def test_a_wrong_row_is_one_line_with_place_field_and_what_is_allowed(tmp_path, row, options, message):
  rows = [{**ROWS[0], 'answer': '#### 1'}, row]
  if options.get('verifier') == 'choice':
    rows = [row, row][:1]
    message = message.replace('line 2', 'line 1')
  with raises_one_line(f"path='.*q.jsonl'?: ?.*{message}"):
    items_of(tmp_path, rows, **options)


@pytest.mark.parametrize(
  ('choices', 'gold'),
  [
    (['Rome', 'Paris'], 'Paris'),
    ({'text': ['Rome', 'Paris'], 'label': ['1', '2']}, '2'),
    ({'X': 'Rome', 'Y': 'Paris'}, 'Y'),
    ([7, 8.5], 'B'),
  ],
)
def test_choices_are_listed_by_letters(tmp_path, choices, gold):
  fields = {'choices': 'choices'}
  rows = [{'question': 'Where?', 'answer': gold, 'choices': choices}]
  (item,) = items_of(tmp_path, rows, fields=fields, verifier='choice')
  assert item.gold == 1
  assert item.text in ('Where?\nA. Rome\nB. Paris', 'Where?\nA. 7\nB. 8.5')


def test_a_pattern_finds_the_gold(tmp_path):
  rows = [{'question': 'a?', 'answer': '#### 1\nthen\n#### 72'}, {'question': 'b?', 'answer': '#### \\frac{1}\n{2}'}]
  golds = [item.gold[1] for item in items_of(tmp_path, rows, answer_pattern='(?s).*#### (.*)$', verifier='number')]
  assert golds == ['72', '\\frac{1}\n{2}']


def test_rows_that_cannot_be_read_may_be_dropped_and_are_counted(tmp_path, caplog):
  rows = [{'question': 'a?', 'answer': '1'}, {'question': 'b?', 'answer': 'one'}, {'question': 'c?'}]
  with caplog.at_level('INFO', 'ragen_jax'):
    (item,) = items_of(tmp_path, rows, verifier='number', bad_rows='drop')
  assert item.question == 'a?'
  (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
  assert '2 rows that cannot be read are left out; the first: ' in warning and "answer='one'" in warning
  with raises_one_line("none of 2 rows can be read; the first: .*answer='one'"):
    items_of(tmp_path, rows[1:], verifier='number', bad_rows='drop')


def test_long_questions_are_left_out_and_counted(tmp_path, caplog):
  rows = [{'question': 'x' * n, 'answer': '1'} for n in (3, 5, 6, 9)]
  with caplog.at_level('INFO', 'ragen_jax'):
    assert [len(item.question) for item in items_of(tmp_path, rows, max_question_chars=5)] == [3, 5]
  assert [r.getMessage() for r in caplog.records if '2 questions with more than max_question_chars=5' in r.getMessage()]
  with raises_one_line('all questions have more than max_question_chars=2 characters'):
    items_of(tmp_path, rows, max_question_chars=2)


def test_the_length_of_a_question_counts_its_choices(tmp_path):
  rows = [{'question': 'Where?', 'answer': 'A', 'choices': ['Rome', 'Paris' + 's' * n]} for n in (0, 1)]
  options = {'fields': {'choices': 'choices'}, 'verifier': 'choice'}
  most = len('Where?\nA. Rome\nB. Paris')
  (item,) = items_of(tmp_path, rows, max_question_chars=most, **options)
  assert item.choices == ('Rome', 'Paris') and len(item.text) == most


def test_questions_that_contradict_themselves_are_reported_once(tmp_path, caplog):
  pairs = [('a?', '1'), ('A?', '1'), ('a?', '2'), ('b?', '1'), ('a?', '3')]
  with caplog.at_level('WARNING', 'ragen_jax'):
    assert len(items_of(tmp_path, [{'question': q, 'answer': a} for q, a in pairs])) == 5
  (warning,) = caplog.records
  assert '2 questions stand there before with another answer' in warning.getMessage()


def test_a_file_without_items_is_refused(tmp_path):
  with raises_one_line(r"path='.*q\.jsonl': has no rows; allowed: at least one question"):
    items_of(tmp_path, [])
  with raises_one_line(r"split='test' with test_share=1e-06 has none of the 1 items; allowed: more items, or"):
    items_of(tmp_path, ROWS, split='test', test_share=1e-6)


def test_the_limit_takes_the_first_items_and_reads_no_further(tmp_path):
  rows = [{'question': f'{i}?', 'answer': '1'} for i in range(5)] + [{'question': 'bad'}]
  assert [item.question for item in items_of(tmp_path, rows, limit=3)] == ['0?', '1?', '2?']
  with raises_one_line("line 6 has no field 'answer'"):
    items_of(tmp_path, rows, limit=6)


def test_the_limit_counts_the_items_that_are_kept(tmp_path):
  rows = [{'question': f'{i}?', 'answer': '1'} for i in range(40)]
  for split in ('train', 'test'):
    kept = [item.question for item in items_of(tmp_path, rows, split=split, test_share=0.5)]
    assert len(kept) > 6 and kept[:6] != [row['question'] for row in rows[:6]]
    assert [x.question for x in items_of(tmp_path, rows, split=split, test_share=0.5, limit=6)] == kept[:6]
  rows = [{'question': 'x' * 9, 'answer': '1'}, {'question': 'bad'}, *rows]
  items = items_of(tmp_path, rows, limit=3, max_question_chars=5, bad_rows='drop')
  assert [item.question for item in items] == ['0?', '1?', '2?']


rows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=12, max_size=60)


@settings(untimed, max_examples=25)
@given(rows, st.floats(0.2, 0.8))
def test_the_parts_of_a_split_share_no_group_and_have_all_items(tmp_path_factory, rows, share):
  path = write_lines(
    tmp_path_factory.mktemp('split') / 'q.jsonl', [{'question': f'{q}?', 'answer': 'x', 'group': g} for q, g in rows]
  )
  for fields in ({}, {'group': 'group'}):
    parts = []
    for split in ('train', 'test'):
      try:
        parts.append(make(path=path, split=split, test_share=share, fields=fields).items)
      except ValueError as e:
        assert 'has none of the' in str(e)
        parts.append(())
    train, test = parts
    assert not {item.id for item in train} & {item.id for item in test}
    assert len(train) + len(test) == len(rows) == len(make(path=path).items)


def test_a_number_may_be_the_solution(tmp_path):
  fields = {'solution': 'answer'}
  (item,) = items_of(tmp_path, [{'question': 'a?', 'answer': 72}], verifier='number', fields=fields)
  assert item.solution == '72'
  rows = [{'question': f'{x}?', 'answer': 'x', 's': x} for x in (72.0, 0.5, math.nan, None)]
  assert [item.solution for item in items_of(tmp_path, rows, fields={'solution': 's'})] == ['72', '0.5', '', '']


def test_a_group_is_one_number_in_both_forms(tmp_path):
  items = items_of(
    tmp_path, [{'question': f'{g}?', 'answer': 'x', 'group': g} for g in (1, 1.0, '1', 1.5)], fields={'group': 'group'}
  )
  assert len({item.id for item in items[:3]}) == 1 and items[3].id != items[0].id


def test_questions_in_both_parts_of_a_split_are_reported(tmp_path, caplog):
  rows = [{'question': f'{i % 20}?', 'answer': 'x', 'group': i} for i in range(40)]
  path = write_lines(tmp_path / 'q.jsonl', rows)
  fields, message = {'group': 'group'}, 'questions are in both parts of the split, in different groups (fields.group)'
  train, test = (make(path=path, split=split, test_share=0.5, fields=fields).items for split in ('train', 'test'))
  both = {item.question for item in train} & {item.question for item in test}
  assert 0 < len(both) < 20 and [f'{len(both)} {message}' in r.getMessage() for r in caplog.records].count(True) == 2
  caplog.clear()
  assert make(path=path, fields=fields).items and make(path=path, split='test', test_share=0.5).items
  assert message not in caplog.text


def test_equal_options_share_their_items_until_the_file_changes(tmp_path):
  load_items.cache_clear()
  first = items_of(tmp_path, ROWS)
  assert make(path=str(tmp_path / 'q.jsonl')).items is first
  assert make(path=str(tmp_path / 'q.jsonl'), limit=1).items is not first
  assert len(items_of(tmp_path, ROWS * 2)) == 2


def test_items_keep_other_fields_only_where_a_verifier_needs_them(tmp_path, monkeypatch):
  assert items_of(tmp_path, ROWS)[0].extra == {}
  monkeypatch.setattr('ragen_jax.envs.dataset.text_verifiers.Exact.needs_extra', True)
  load_items.cache_clear()
  assert items_of(tmp_path, ROWS)[0].extra == {name: ROWS[0][name] for name in ('choices', 'solution', 'group')}
  load_items.cache_clear()


def test_the_gold_of_a_function_is_any_value(tmp_path):
  (item,) = items_of(tmp_path, [{'question': 'a?', 'answer': {'any': ['b']}}], verifier=f'{FUNCTIONS}:is_in')
  assert item.gold == {'any': ['b']}
