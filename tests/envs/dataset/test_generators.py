"""Items that reasoning-gym generates, and its scores, against the package itself."""

from __future__ import annotations

import sys
import types

import pytest

from ragen_jax.envs.dataset.generators import ReasoningGym
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.verifiers import VerifierSettings
from ragen_jax.utils.threads import Fault
from tests.support.datasets import make, reference_answers
from tests.support.environments import raises_one_line


@pytest.fixture
def package():
  return pytest.importorskip('reasoning_gym', reason='needs reasoning-gym, requirements-data.txt')


def generated(name, **options):
  size = {'generator_options': {'size': 30, **options}, 'order': 'fixed'}
  return make(generator=f'reasoning_gym:{name}', verifier='reasoning_gym', **size)


@pytest.mark.parametrize('name', ['gsm_symbolic', 'basic_arithmetic', 'simple_equations', 'syllogism'])
def test_items_and_scores_are_those_of_the_package(package, name):
  env, theirs = generated(name, seed=5), package.create_dataset(name, size=30, seed=5)
  env.check()
  assert [item.question for item in env.items] == [theirs[i]['question'].strip() for i in range(30)]
  session = env.open(30)
  session.reset(range(30), range(30), [0] * 30)
  answers = [own[0] if i % 3 else 'wrong' for i, own in enumerate(reference_answers(env, range(30)))]
  scores = [theirs.score_answer(answer, theirs[i]) for i, answer in enumerate(answers)]
  results = session.step(range(30), answers)
  assert [x[3]['metrics']['package_score'] for x in results] == scores
  assert [x[1] for x in results] == [float(score == 1) for score in scores] and 10 < sum(x[1] for x in results) < 25


def test_another_seed_makes_other_items(package):
  assert generated('gsm_symbolic').items[0].question != generated('gsm_symbolic', seed=1).items[0].question


def test_a_question_that_is_generated_twice_has_the_same_answer(package, caplog):
  """The metadata of items differ always."""
  golds = {}
  for item in generated('coin_flip', size=300).items:
    golds.setdefault(item.text, []).append(item.gold)
  assert any(len(same) > 1 and same[0] != same[1] for same in golds.values())
  assert all(len({gold['answer'] for gold in same}) == 1 for same in golds.values())
  assert not [x for x in caplog.records if 'another answer' in x.getMessage()]


def test_an_answer_with_two_numbers_or_a_wrong_sign_is_not_paid(package):
  """The package's own rule takes the first number, without its sign."""
  env = generated('gsm_symbolic')
  (answer,) = reference_answers(env, [0])[0]
  theirs = package.create_dataset('gsm_symbolic', size=1, seed=0)
  session = env.open(4)
  session.reset(range(4), [0] * 4, [0] * 4)
  given = [answer, f'The answer is {answer}.', f'{answer} 7', f'-{answer}']
  assert [theirs.score_answer(x, theirs[0]) for x in given] == [1.0] * 4
  assert [x[1] for x in session.step(range(4), given)] == [1.0, 1.0, 0.0, 0.0]


def test_puzzles_without_one_right_answer_are_scored(package):
  env = generated('rubiks_cube', size=3)
  env.check()
  assert reference_answers(env, [0]) == [[]]
  session = env.open(1)
  session.reset([0], [0], [0])
  assert session.step([0], ['U'])[0][1] == 0.0


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('gsm_symbolc', {}, "generator='reasoning_gym:gsm_symbolc'; did you mean 'gsm_symbolic'\\? allowed: ab, "),
    ('gcd', {'size': 0}, r'generator_options\.size=0; allowed: whole numbers from 1 to 1,000,000'),
    ('gcd', {'size': 10**7}, r'generator_options\.size=10000000; allowed'),
    ('gcd', {'sice': 3}, r"does not take generator_options=.*'sice': 3.* \(TypeError"),
    ('basic_arithmetic', {'min_digits': -1}, r'does not take generator_options=.*\(AssertionError: min_digits must'),
  ],
)
def test_wrong_generators_are_one_line(package, name, options, message):
  with raises_one_line(message):
    generated(name, **options).check()


# -- the verifier, with a stand-in for the package's data set ----------------------------------------------------------


def decide(monkeypatch, scores, right='x', **options):
  """The verdicts for answers, which are the package's scores."""

  def score_answer(answer, entry):
    del entry
    score = scores[answer]
    if isinstance(score, Exception):
      raise score
    return score

  made = types.SimpleNamespace(score_answer=score_answer)
  package = types.SimpleNamespace(
    factory=types.SimpleNamespace(DATASETS={'x': None}), create_dataset=lambda name, **options: made
  )
  monkeypatch.setitem(sys.modules, 'reasoning_gym', package)
  verifier = ReasoningGym(VerifierSettings(options, 30.0, 2, 'reasoning_gym:x', {}))
  return verifier.score(list(scores), [Item('?', {'answer': right})] * len(scores))


def test_only_what_reaches_the_threshold_is_right(monkeypatch):
  scores = {'a': 1.0, 'b': 0.99, 'c': 0.01, 'd': 0}
  found = decide(monkeypatch, scores)
  assert [v.score for v in found] == [1.0, 0.0, 0.0, 0.0]
  assert [v.metrics['package_score'] for v in found] == [1.0, 0.99, 0.01, 0.0]
  assert [v.verdict for v in found] == ['right', 'wrong', 'wrong', 'wrong']
  assert [v.score for v in decide(monkeypatch, scores, threshold=0.9)] == [1.0, 1.0, 0.0, 0.0]
  assert [v.score for v in decide(monkeypatch, scores, partial=True)] == [1.0, 0.99, 0.01, 0.0]


def test_exceptions_and_wrong_scores_of_the_package_are_faults(monkeypatch):
  found = decide(monkeypatch, {'a': KeyError('x'), 'b': None, 'c': 1.5, 'd': float('nan'), 'e': 1})
  assert [isinstance(x, Fault) for x in found] == [True] * 4 + [False]
  assert found[0].kind == 'verifier raised KeyError'


@pytest.mark.parametrize(
  ('right', 'answer', 'score'),
  [('7', '7', 1), ('7', '7 8', 0), ('7', '-7', 0), ('-7', '-7', 1), ('7', 'seven', 0), ('1,000', '1000', 1),
   ('3*4', '3*4', 1), ('7 8', '7 8', 1), (None, '7 8', 1), ('7 m', '7 8', 1)],
)  # fmt: skip
def test_where_the_right_answer_is_a_number_only_one_number_is_an_answer(monkeypatch, right, answer, score):
  assert decide(monkeypatch, {answer: 1.0}, right)[0].score == score


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'threshold': 2}, r'verifier_options\.threshold=2; allowed: numbers from 0 to 1'),
    ({'partial': 1}, r'verifier_options\.partial=1; allowed: True, False'),
    ({'size': 1}, r'verifier_options\.size=1; allowed: threshold, partial'),
  ],
)
def test_wrong_options_of_the_verifier_are_refused(options, message):
  with raises_one_line(message):
    ReasoningGym(VerifierSettings(options, 30.0, 2, 'reasoning_gym:x', {}))
