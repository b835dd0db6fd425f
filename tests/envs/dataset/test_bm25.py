"""Passages of a file and their BM25 scores, against the formula written as loops over words."""

from __future__ import annotations

import collections
import json
import logging
import math
import random
import re
import unicodedata

import pytest

from ragen_jax.envs.dataset.bm25 import Bm25Index, as_passage, read_corpus, words_of
from tests.support.environments import raises_one_line

needs_bm25s = pytest.mark.skipif(
  __import__('importlib.util').util.find_spec('bm25s') is None, reason='bm25s is not installed: requirements-data.txt'
)

WORDS = ('the', 'a', 'river', 'bridge', 'city', 'engine', 'cat', 'wrote', 'Ada', 'Été', 'straße', '1843', 'x')


def score(passages, number, query):
  """The score of one passage, by the formula of Lucene's variant."""
  split = [re.findall(r'\w+', unicodedata.normalize('NFKC', text).casefold()) for text in passages]
  words, mean = split[number], sum(map(len, split)) / len(split)
  total = 0.0
  for word in set(re.findall(r'\w+', unicodedata.normalize('NFKC', query).casefold())):
    containing = sum(word in other for other in split)
    times = collections.Counter(words)[word]
    idf = math.log(1 + (len(split) - containing + 0.5) / (containing + 0.5))
    total += idf * times / (times + 1.5 * (0.25 + 0.75 * len(words) / mean))
  return total


@needs_bm25s
@pytest.mark.parametrize('seed', range(6))
@pytest.mark.exhaustive_cases('2', '5')
def test_the_ranking_is_that_of_the_formula(seed):
  rng = random.Random(seed)
  passages = [' '.join(rng.choices(WORDS, k=rng.randrange(1, 30))) + f' {i}' for i in range(rng.randrange(1, 60))]
  index = Bm25Index(passages)
  for _ in range(30):
    query, top_k = (
      ' '.join(rng.choices([*WORDS, 'nowhere', 'STRASSE', 'river'], k=rng.randrange(1, 6))),
      rng.randrange(1, 9),
    )
    found = index.search(query, top_k)
    scores = [score(passages, i, query) for i in range(len(passages))]
    numbers = [passages.index(passage) for passage in found]
    assert len(set(numbers)) == len(found) == min(top_k, sum(s > 0 for s in scores))
    best = sorted(scores, reverse=True)[: len(found)]
    assert [scores[i] for i in numbers] == pytest.approx(best, rel=1e-5)


@needs_bm25s
def test_equal_passages_are_in_the_order_of_the_file():
  index = Bm25Index([f'cat {chr(97 + i)}' for i in range(26)] + ['the cat'] * 3)
  assert index.search('cat', 5) == ['cat a', 'cat b', 'cat c', 'cat d', 'cat e']
  assert index.search('cat the', 5) == ['the cat'] * 3 + ['cat a', 'cat b']
  assert len(index.search('cat', 50)) == 29


@needs_bm25s
@pytest.mark.parametrize('query', ['dog', '', ' ?! ', '日本', 'ca', 'cats'])
def test_without_a_common_word_there_is_no_hit(query):
  assert Bm25Index(['a cat', '...', 'the river']).search(query, 3) == []


@needs_bm25s
def test_a_word_counts_once_in_a_query():
  index = Bm25Index(['cat cat cat river', 'river bridge', 'bridge x'])
  assert index.search('river bridge river river cat cat', 3) == index.search('river bridge cat', 3)
  assert index.search('bridge ' * 300 + 'cat', 1) == ['cat cat cat river']


@needs_bm25s
def test_the_package_logs_and_shows_nothing(caplog, capfd):
  with caplog.at_level(logging.DEBUG):
    Bm25Index(['a cat']).search('', 1)
    Bm25Index(['a cat']).search('cat', 1)
  assert not [record for record in caplog.records if record.name.startswith('bm25s')]
  assert capfd.readouterr() == ('', '')  # no bars of progress


def test_words_have_no_case_and_one_form():
  assert words_of("Été, the STRASSE; Ada's ﬁle x²") == ['été', 'the', 'strasse', 'ada', 's', 'file', 'x2']
  assert words_of('straße') == ['strasse'] and words_of(' ... ') == []
  assert words_of('E\u0301te\u0301') == words_of('Été')


@pytest.mark.parametrize(
  ('contents', 'title', 'passage'),
  [
    ('A city.', 'Turin', 'Turin\nA city.'),
    (' A city. ', ' Turin ', 'Turin\nA city.'),
    ('"Turin"\nA city.\nOld.', '', 'Turin\nA city.\nOld.'),
    ('Turin\nA city.', '', 'Turin\nA city.'),
    ('A city.', '', 'A city.'),
    ('"A city."', '', '"A city."'),
    ('"Turin" is\na city', '', '"Turin" is\na city'),
    ('""\nA city.', '', '""\nA city.'),
    ('"Turin"\nA city.', 'Other', 'Other\n"Turin"\nA city.'),
  ],
)
def test_the_title_is_the_first_line(contents, title, passage):
  assert as_passage(contents, title) == passage


def write(tmp_path, text):
  path = tmp_path / 'corpus.jsonl'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def test_a_corpus_is_read_line_by_line(tmp_path):
  rows = [
    {'id': 'a', 'title': 'Turin', 'contents': 'A city.\u2028On the Po.'},
    {'contents': '"Po"\nA river.', 'other': 3},
    {'id': 7, 'contents': 'Été'},
  ]
  lines = [json.dumps(rows[0], ensure_ascii=False), '', json.dumps(rows[1]), '  ', json.dumps(rows[2])]
  expected = ['Turin\nA city.\u2028On the Po.', 'Po\nA river.', 'Été']
  for text in ('\n'.join(lines), '\r\n'.join(lines) + '\r\n', '\ufeff' + '\n'.join(lines)):
    assert read_corpus(write(tmp_path, text)) == expected


GOOD = '{"contents": "a"}\n'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (GOOD + '{"contents": "a"\n', r'line 2 is no JSON \(Expecting .*\); allowed: \{\"title\": text, '),
    (GOOD + '\n' + GOOD + 'contents\n', r'line 4 is no JSON'),
    ('[' * 200_000, r'line 1 is no JSON \(maximum recursion'),
    ('["a"]', r"line 1 is \['a'\]; allowed: "),
    ('{"text": "a"}', r"line 1 is \{'text': 'a'\}; allowed: "),
    ('{"contents": 3}', r"line 1 is \{'contents': 3\}; allowed: "),
    ('{"contents": " "}', r"line 1 is \{'contents': ' '\}; allowed: "),
    ('{"contents": "a", "title": null}', 'line 1 is .*; allowed: '),
    ('', 'has no passage; allowed: lines with '),
    ('\n \n', 'has no passage; allowed: lines with '),
  ],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, text, message):
  with raises_one_line(f'^{message}'):
    read_corpus(write(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path):
  with pytest.raises(UnicodeDecodeError):
    read_corpus(write(tmp_path, GOOD.encode() + b'\xff'))
