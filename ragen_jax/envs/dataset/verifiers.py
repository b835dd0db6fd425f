"""The interface of verifiers, which compare answers with what a data set says, their registry, and functions of users.

A verifier is chosen by `envs.TAG.verifier`: a name of `VERIFIERS`, or the import path of a function of the user. It
scores a batch of answers and never raises: what goes wrong in it is a `Fault`, which ends the episode as an error, and
never a reward.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.options import check_mapping, is_number
from ragen_jax.utils.errors import did_you_mean, one_line, short
from ragen_jax.utils.imports import import_function, import_object
from ragen_jax.utils.threads import Fault, run_calls

# Name -> the class. Only the class that is asked for is imported, because some need optional packages.
VERIFIERS: Mapping[str, str] = {
  'exact': 'ragen_jax.envs.dataset.text_verifiers:Exact',
  'number': 'ragen_jax.envs.dataset.text_verifiers:Number',
  'choice': 'ragen_jax.envs.dataset.text_verifiers:Choice',
  'f1': 'ragen_jax.envs.dataset.text_verifiers:F1',
  'math': 'ragen_jax.envs.dataset.math_verifier:Math',
  'reasoning_gym': 'ragen_jax.envs.dataset.generators:ReasoningGym',
  'code': 'ragen_jax.envs.dataset.programs:ProgramVerifier',
}
INSTALL = 'pip install -r requirements-data.txt'
_METRIC = re.compile(r'[a-z][a-z0-9_]{0,63}')


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a verifier says about one answer.

  Attributes:
    score: from 0 to 1; 1 is right.
    metrics: numbers to log, by names in snake case.
    verdict: one word, such as 'right', 'wrong' or 'unreadable'.
  """

  score: float
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  verdict: str = ''


RIGHT, WRONG = Verdict(1.0, verdict='right'), Verdict(0.0, verdict='wrong')


@dataclasses.dataclass(frozen=True)
class VerifierSettings:
  """Fields of `config.envs.TAG` that verifiers read.

  Attributes:
    options: `verifier_options`; each verifier has its own.
    timeout_s: seconds that one answer may take, where foreign code decides.
    workers: answers that are decided at a time, in threads or processes.
    generator: the generator of the items, '' for none.
    generator_options: its options.
  """

  options: Mapping[str, Any]
  timeout_s: float
  workers: int
  generator: str
  generator_options: Mapping[str, Any]


class Verifier(abc.ABC):
  """Decides whether answers are right. The constructor takes `VerifierSettings`.

  Class attributes:
    answer_help: one line for the prompt: how an answer is written.
    has_reference: whether `reference` knows a right answer of every item.
    needs_extra: whether items keep the fields of their row that nothing else reads.
    needs_answer: whether a row without an answer is wrong; False if the verifier knows right answers otherwise.
  """

  answer_help: str = 'Your answer is free text.'
  has_reference: ClassVar[bool] = False
  needs_extra: ClassVar[bool] = True
  needs_answer: ClassVar[bool] = True

  @abc.abstractmethod
  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> Any:
    """The gold of a row, in the form that `score` compares with.

    Args:
      raw: the value of the field `fields.answer`, or what `answer_pattern` found in it; None only if `needs_answer` is
        False.
      row: all fields of the row. If it has choices, 'choices' is a tuple of their texts, and 'choice_labels' of their
        labels.

    Raises:
      ValueError: the gold cannot be read; the message says what is allowed.
    """

  def identity(self, question: str, gold: Any) -> str:
    """What tells a question from others where the row has no group; its text by default.

    Items whose identities are equal but for letter case and white space are on one side of a split.
    """
    del gold
    return question

  def answer_of(self, gold: Any) -> Any:
    """What two golds of one question have in common if they name the same answer; the gold itself by default."""
    return gold

  @abc.abstractmethod
  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    """A verdict for each answer, or the fault that prevents one. Never raises."""

  def check(self) -> None:
    """Raises ValueError, with one line, if a package or a program is missing. The default needs nothing."""
    return

  def check_golds(self, golds: Sequence[Any]) -> dict[int, str]:
    """Reads golds of which `read_gold` could only see the form: index of each that cannot be read -> the reason."""
    del golds
    return {}

  def reference(self, item: Item) -> str:
    """An answer that is right, for demonstrations; '' if none is known. The default is the item's solution."""
    return item.solution

  def close(self) -> None:
    """Ends what the verifier started. The default started nothing."""
    return


def check_verifier(name: Any) -> None:
  """Raises ValueError if there is no such verifier. A function is imported by `make_verifier` only."""
  if not isinstance(name, str) or (name not in VERIFIERS and ':' not in name):
    hint = did_you_mean(str(name), VERIFIERS)
    allowed = f"{', '.join(VERIFIERS)}, or a function, 'package.module:function' or 'file.py:function'"
    raise ValueError(f'dataset: verifier={one_line(name)}; {hint}allowed: {allowed}')


def make_verifier(name: str, settings: VerifierSettings) -> Verifier:
  """The verifier of a name, or of a function.

  Raises:
    ValueError: there is no such verifier or function, or an option is not allowed.
  """
  check_verifier(name)
  if name in VERIFIERS:
    return import_object('dataset: verifier', VERIFIERS[name])(settings)
  return FunctionVerifier(name, settings)


def read_options(settings: VerifierSettings, defaults: Mapping[str, Any]) -> dict[str, Any]:
  """The options of a verifier, with defaults; ValueError for an option that it does not have."""
  given = check_mapping('dataset', 'verifier_options', settings.options)
  unknown = sorted(set(given) - set(defaults))
  if unknown:
    allowed = ', '.join(defaults) or 'none for this verifier'
    raise ValueError(f'dataset: verifier_options.{unknown[0]}={one_line(given[unknown[0]])}; allowed: {allowed}')
  return {**defaults, **given}


def check_fraction(option: str, value: Any) -> float:
  """A number from 0 to 1; ValueError for anything else."""
  if not is_number(value) or not 0 <= value <= 1:
    raise ValueError(f'dataset: verifier_options.{option}={one_line(value)}; allowed: numbers from 0 to 1')
  return float(value)


class FunctionVerifier(Verifier):
  """A function of the user: `function(gold, answer, **verifier_options)` -> score, or (score, metrics).

  The score is a bool or a number from 0 to 1, and 1 is right; metrics are finite numbers by names in snake case. `gold`
  is the value of the answer's field, which can be any value of JSON except null. An exception, a result of another form
  and a call over the time limit are faults.
  """

  needs_extra = False

  def __init__(self, path: str, settings: VerifierSettings):
    """Imports the function.

    Raises:
      ValueError: it cannot be imported, or does not take the arguments.
    """
    self._function = import_function('dataset: verifier', path)
    self._options = check_mapping('dataset', 'verifier_options', settings.options)
    self._how = {'workers': settings.workers, 'timeout_s': settings.timeout_s}
    try:
      inspect.signature(self._function).bind('gold', 'answer', **self._options)
    except TypeError as e:
      raise ValueError(
        f'dataset: verifier={path!r} does not take (gold, answer, **verifier_options) with '
        f'verifier_options={one_line(self._options)} ({one_line(e, str)})'
      ) from e
    except ValueError:  # some builtins have no signature
      pass

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> Any:
    """The value itself."""
    del row
    return raw

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    calls = [functools.partial(self._call, item.gold, answer) for answer, item in zip(answers, items, strict=True)]
    results = run_calls(calls, what='verifier', owner=self, **self._how)
    return [fault or verdict for verdict, fault in results]

  def _call(self, gold: Any, answer: str) -> Verdict | Fault:
    # The result is read inside the call, because foreign objects may hang or raise too.
    return read_result(self._function(gold, answer, **self._options))

  def reference(self, item: Item) -> str:
    """The item's solution; without one, the gold if it is text."""
    return item.solution or (item.gold if isinstance(item.gold, str) else '')


def read_result(raw: Any) -> Verdict | Fault:
  """The verdict in a score, or in (score, metrics)."""
  score, metrics = raw if isinstance(raw, tuple | list) and len(raw) == 2 else (raw, {})
  if isinstance(score, bool | np.bool_):
    score = float(score)
  if not is_number(score) or not 0 <= score <= 1:
    return Fault('verifier returned no score from 0 to 1', short(raw))
  if not isinstance(metrics, Mapping):
    return Fault('verifier returned no mapping of metrics', short(raw))
  read = {}
  for name, value in metrics.items():
    value = float(value) if isinstance(value, bool | np.bool_) or is_number(value) else math.nan
    if not isinstance(name, str) or not _METRIC.fullmatch(name) or not math.isfinite(value):
      return Fault('verifier returned a metric that is no finite number by a name in snake case', short({name: value}))
    read[name] = value
  return Verdict(float(score), read, 'right' if score == 1 else 'wrong')


def batch(
  answers: Sequence[str], items: Sequence[Item], decide: Callable[[str, Item], Verdict]
) -> list[Verdict | Fault]:
  """The verdicts of a function that decides one answer, for verifiers of this package whose code cannot hang."""
  calls = [functools.partial(decide, answer, item) for answer, item in zip(answers, items, strict=True)]
  return [fault or verdict for verdict, fault in run_calls(calls, what='verifier', workers=0, timeout_s=math.inf)]
