"""Questions that reasoning-gym generates, and its own scores of answers; an optional package."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.numbers_in_text import read_number
from ragen_jax.envs.dataset.sources import Row
from ragen_jax.envs.dataset.verifiers import INSTALL, Verdict, Verifier, VerifierSettings, check_fraction, read_options
from ragen_jax.envs.options import check_flag, is_number
from ragen_jax.utils.errors import describe_error, did_you_mean, one_line, short
from ragen_jax.utils.threads import Fault, run_calls

# Items of a generator whose options set no `size`.
DEFAULT_SIZE = 5000
# All items of a generator are made at load.
_MOST = 1_000_000


def _package(what: str) -> Any:
  try:
    import reasoning_gym
  except ImportError as e:
    raise ValueError(f'dataset: {what} needs the package reasoning-gym, which is missing: {INSTALL}') from e
  return reasoning_gym


def make_generator(generator: str, options: Mapping[str, Any]) -> Any:
  """The package's data set.

  Args:
    generator: 'reasoning_gym:NAME'.

  Raises:
    ValueError: the package is missing, has no such data set, or the options are not allowed.
  """
  where, name = f'dataset: generator={generator!r}', generator.partition(':')[2]
  package = _package(f'generator={generator!r}')
  options = {'size': DEFAULT_SIZE, 'seed': 0, **options}
  size = options['size']
  if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST:
    raise ValueError(f'dataset: generator_options.size={one_line(size)}; allowed: whole numbers from 1 to {_MOST:,}')
  known = sorted(package.factory.DATASETS)
  if name not in known:
    raise ValueError(f'{where}; {did_you_mean(name, known)}allowed: {", ".join(known)}')
  try:
    return package.create_dataset(name, **options)
  except Exception as e:  # assertions of the package, and options that it does not have
    raise ValueError(f'{where} does not take generator_options={one_line(options)} ({describe_error(e)})') from e


def generate(generator: str, options: Mapping[str, Any]) -> Iterator[Row]:
  """The items of a generator as rows with the package's fields: question, answer and metadata.

  Raises:
    ValueError: see `make_generator`; or an item cannot be generated, while iterating.
  """
  made = make_generator(generator, options)
  for i in range(len(made)):
    place = f'dataset: generator={generator!r}: item {i}'
    try:
      row = made[i]
    except Exception as e:  # whatever the generator raises
      raise ValueError(f'{place} cannot be generated ({describe_error(e)})') from e
    yield place, row


class ReasoningGym(Verifier):
  """The score of the generator itself, which knows all right answers of a question that has several.

  The package gives 0.01 for a wrong answer, and a part for an answer with other words around the right one. Here an
  answer counts if its score reaches the option `threshold`, and is worth 0 otherwise. With `partial` the package's
  score is the reward. The metric `package_score` is the package's score in either case.

  Some generators take the first number of an answer and lose its sign. Where the right answer is a number, an answer
  therefore counts only if it contains exactly one number, of the same sign.
  """

  answer_help = 'Your answer has exactly the form that the question asks for.'
  has_reference: ClassVar[bool] = True
  needs_extra: ClassVar[bool] = False
  needs_answer: ClassVar[bool] = False  # a puzzle with many right answers may name none

  def __init__(self, settings: VerifierSettings):
    options = read_options(settings, {'threshold': 1.0, 'partial': False})
    self._threshold = check_fraction('threshold', options['threshold'])
    check_flag('dataset', 'verifier_options.partial', options['partial'])
    self._partial, self._settings = options['partial'], settings

  @functools.cached_property
  def _generator(self) -> Any:
    return make_generator(self._settings.generator, self._settings.generator_options)

  def check(self) -> None:
    """Raises ValueError if the generator cannot be made."""
    self._generator  # noqa: B018

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole entry, of which the generator's score reads what it needs."""
    del raw
    return row

  def answer_of(self, gold: Mapping[str, Any]) -> Any:
    """The generator's answer; the number of the item and other metadata do not matter."""
    return gold.get('answer')

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    calls = [functools.partial(self._decide, answer, item.gold) for answer, item in zip(answers, items, strict=True)]
    how = {'workers': self._settings.workers, 'timeout_s': self._settings.timeout_s}
    return [fault or verdict for verdict, fault in run_calls(calls, what='verifier', owner=self, **how)]

  def _decide(self, answer: str, entry: Mapping[str, Any]) -> Verdict | Fault:
    raw = self._generator.score_answer(answer=answer, entry=entry)
    if not is_number(raw) or not 0 <= raw <= 1:
      return Fault('verifier returned no score from 0 to 1', short(raw))
    if not _is_one_number_where_due(answer, entry.get('answer')):
      return Verdict(0.0, {'package_score': float(raw)}, 'unreadable')
    right = raw >= self._threshold
    score = 1.0 if right else float(raw) if self._partial else 0.0
    return Verdict(score, {'package_score': float(raw)}, 'right' if right else 'wrong')

  def reference(self, item: Item) -> str:
    """The generator's answer; '' where it has none because there are many."""
    answer = item.gold.get('answer')
    return answer if isinstance(answer, str) else ''


def _is_one_number_where_due(answer: str, right: Any) -> bool:
  """Whether an answer is a number of the right one's sign, if the right one is nothing but a number."""
  if not isinstance(right, str) or not re.fullmatch(r'\s*[+-]?\d[\d,]*(\.\d+)?\s*', right, re.ASCII):
    return True
  expected, given = read_number(right), read_number(answer)
  if expected is None:
    return True
  return given is not None and (given.value < 0) == (expected.value < 0)
