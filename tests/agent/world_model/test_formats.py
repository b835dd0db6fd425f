"""The five forms of replies: what is of a form, what is not, and texts that are hard to read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.world_model.formats import (
  FORMATS,
  Sections,
  describe_form,
  described_sections,
  example_of,
  has_thought,
  innermost_tags,
  opening_tags,
  read_answer,
  read_sections,
  write_reply,
)

RIGHT = {
  'no_think': '<answer>Up</answer>',
  'free_think': '<think>t</think><answer>Up</answer>',
  'state_estimation': '<think><observation>o</observation><reasoning>r</reasoning></think><answer>Up</answer>',
  'transition_modeling': '<think><reasoning>r</reasoning><prediction>p</prediction></think><answer>Up</answer>',
  'world_modeling': (
    '<think><observation>o</observation><reasoning>r</reasoning><prediction>p</prediction></think><answer>Up</answer>'
  ),
}
TEXTS = {'think': 't', 'observation': 'o', 'reasoning': 'r', 'prediction': 'p', 'answer': 'Up'}
each = pytest.mark.parametrize('form', FORMATS)


@each
def test_a_reply_of_a_form_is_of_no_other(form):
  assert set(RIGHT) == set(FORMATS)
  texts = {name: TEXTS[name] for name in innermost_tags(form)}
  assert write_reply(form, texts) == RIGHT[form]
  for other in FORMATS:
    expected = Sections(True, texts) if other == form else Sections(False, {})
    assert read_sections(RIGHT[form], other) == expected


@each
def test_blanks_may_be_between_tags_and_anything_but_tags_within(form):
  loose = '\n ' + RIGHT[form].replace('>', '> ').replace('<', '\n<').replace('Up', ' a < b </x>\n') + '\t'
  read = read_sections(loose, form)
  assert read.correct and read.texts['answer'].strip() == 'a < b </x>'
  assert set(read.texts) == set(innermost_tags(form))
  empty = RIGHT[form]
  for text in '>Up<', '>o<', '>r<', '>p<', '>t<':
    empty = empty.replace(text, '><')
  assert read_sections(empty, form) == Sections(True, dict.fromkeys(innermost_tags(form), ''))


@each
def test_a_changed_reply_is_of_no_form(form):
  right = RIGHT[form]
  pieces = [piece for piece in right.replace('<', '\n<').replace('>', '>\n').split('\n') if piece]
  tags = [i for i, piece in enumerate(pieces) if piece[0] == '<']
  wrong = [right + 'x', 'x' + right, right * 2, right + '<answer>', '', 'Up', right.replace('answer', 'Answer')]
  wrong += [''.join(pieces[:i] + pieces[i + 1 :]) for i in tags]  # without a tag
  wrong += [''.join(pieces[:i] + [pieces[i]] * 2 + pieces[i + 1 :]) for i in tags]  # with one twice
  for i, j in itertools.combinations(tags, 2):
    swapped = list(pieces)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    wrong.append(''.join(swapped))
  outside = [i for i, j in itertools.pairwise(tags) if j == i + 1]
  wrong += [''.join([*pieces[: i + 1], 'x', *pieces[i + 1 :]]) for i in outside]
  for reply in wrong:
    if not (form == 'no_think' and reply == right):
      assert read_sections(reply, form) == Sections(False, {}), reply


PIECES = ['<think>', '</think>', '<answer>', '</answer>', '<']


@given(st.sampled_from([*FORMATS]), st.lists(st.sampled_from(PIECES) | st.text()))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read(form, pieces):
  read = read_sections(''.join(pieces), form)
  assert read.correct == bool(read.texts)


@each
@pytest.mark.parametrize('piece', ['<think>', '<', '</answer>', '<observation>x', ' '])
def test_long_texts_are_read_in_one_pass(form, piece):
  assert not read_sections(RIGHT[form][:-9] + piece * 200_000, form).correct


@each
def test_requests_show_the_form(form):
  for shown in (describe_form(form), example_of(form, 'Up || Down')):
    assert read_sections(shown, form).correct
    assert shown.startswith(opening_tags(form)) and has_thought(form) == shown.startswith('<think>')
    assert described_sections(form) == tuple(x for x in ('observation', 'prediction') if f'<{x}>' in shown)
  assert read_answer(example_of(form, 'Up || Down'), form) == 'Up || Down'


@each
def test_answers_are_read_without_the_form_where_it_has_sections(form):
  sections = form not in ('no_think', 'free_think')
  assert read_answer(RIGHT[form], form) == 'Up' and read_answer(RIGHT[form][:-1], form) is None
  assert read_answer(RIGHT[form] + ' and more', form) == 'Up'
  assert read_answer('well: ' + RIGHT[form], form) == ('Up' if sections else None)
  assert read_answer(RIGHT['no_think'], form) == (None if form == 'free_think' else 'Up')
  assert read_answer('<think><answer>a</answer></think>b<answer>c</answer>', form) == ('c' if sections else None)
