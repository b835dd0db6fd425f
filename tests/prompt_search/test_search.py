"""The search keeps the best prompts, chooses without peeking, counts what it rejects, and resumes from any step."""

from __future__ import annotations

import json
import math

import pytest

from ragen_jax.agent.episode import TextReply
from ragen_jax.prompt_search.critic import Critic
from ragen_jax.prompt_search.journal import Journal
from ragen_jax.prompt_search.search import REASONS, Score, Search, standard_error
from ragen_jax.utils.errors import UserError
from tests.support.prompt_search import Programs, Script, attempt, ranges, settings, tagged


def _stars(prompt, number):
  """Each star of a prompt scores a tenth; some tasks are harder."""
  return prompt.count('*') / 10 - (number % 2) / 100


def _numbered(marks='*'):
  """Edits that add the next of `marks` and a number, so that all prompts differ."""
  count = iter(range(1000))
  return lambda prompt: tagged(f'{prompt}{marks[(n := next(count)) % len(marks)]}{n}')


def _run(tmp_path, programs, critic, prompt='go', name='j', tasks=None, **changes):
  rounds = []
  search = Search(settings(**changes), Journal(tmp_path / name, {}), programs, critic, tasks or ranges())
  last, final = search.run(prompt, rounds.append)
  return last, final, rounds


def test_the_best_prompts_survive_and_improve(tmp_path):
  programs, critic = Programs(_stars), Script(_numbered('*-'))
  last, final, rounds = _run(tmp_path, programs, critic)
  assert [r.number for r in rounds] == [0, 1, 2]
  assert [len(r.prompts) for r in rounds] == [1, 3, 7]
  assert rounds[1].beam == (1, 0)  # prompt 2 is no better than its older parent
  assert last.best.text == 'go*0*2' and last.best.parent == 1 and last.best.round == 2
  assert last.best.score.mean == pytest.approx(0.2 - 0.005)
  assert last.best.critique == 'Write it better.' and last.prompts[0].critique == ''
  assert [p.parent for p in last.prompts] == [None, 0, 0, 1, 1, 0, 0]
  assert final.differences == pytest.approx([0.2] * 3)


def test_all_prompts_are_scored_on_the_same_held_out_tasks_and_chosen_without_the_final_ones(tmp_path):
  programs = Programs(_stars)
  last, final, _ = _run(tmp_path, programs, Script(_numbered()))
  val = [(p, n) for p, tag, n in programs.played if tag == 'Val']
  for prompt in last.prompts:
    others = [14, 15, 16] if prompt.number in (0, last.best.number) else []
    assert [n for p, n in val if p == prompt.text] == [10, 11, 12, 13, *others]
  assert val[-6:] == [(last.best.text, n) for n in (14, 15, 16)] + [('go', n) for n in (14, 15, 16)]
  assert len(final.best.tasks) == 3


def test_each_critique_sees_training_tasks_of_its_own(tmp_path):
  programs, critic = Programs(_stars), Script(_numbered())
  _run(tmp_path, programs, critic, branches=3, rounds=3)
  numbers = [n for _, tag, n in programs.played if tag == 'Train']
  assert len(numbers) == len(set(numbers)) == 2 * (3 + 6 + 6)
  # The range that `TaskRanges.check` compares with the held-out tasks.
  assert min(numbers) == 1000 and max(numbers) < 1000 + 2 * settings(branches=3, rounds=3).batches
  seen = ''.join(critic.critiques)
  assert all(f'{{"seed": {n}}}' in seen for n in numbers)
  assert not any(f'{{"seed": {n}}}' in seen for n in range(10, 17))
  # The attempts are those of the prompt that the critique is about.
  assert [p for p, tag, _ in programs.played if tag == 'Train'][:6] == ['go'] * 6


def test_only_failed_attempts_are_criticised(tmp_path):
  programs, critic = Programs(lambda prompt, number: float(number % 2)), Script(_numbered())
  _run(tmp_path, programs, critic, rounds=1)
  assert all('{"seed": 1000}' in text or '{"seed": 1002}' in text for text in critic.critiques)
  assert not any('1001' in text or '1003' in text for text in critic.critiques)
  last, _, _ = _run(tmp_path, Programs(lambda prompt, number: 1.0), critic, name='k', rounds=1)
  assert len(last.prompts) == 1 and last.rejected['nothing_failed'] == 2 and len(critic.critiques) == 2


@pytest.mark.parametrize(
  ('edit', 'critique', 'reason'),
  [
    (None, 'Bad.', 'edit_lost'),
    ('go on', 'Bad.', 'no_prompt'),
    (tagged('  \n '), 'Bad.', 'empty'),
    (tagged('x' * 31 + '{a}' + 'y' * 7), 'Bad.', 'too_long'),
    (tagged('go {a}'), 'Bad.', 'unchanged'),
    (tagged('go!'), 'Bad.', 'placeholders'),
    (tagged('go {a} {b}'), 'Bad.', 'placeholders'),
    (tagged('new {a}'), None, 'critique_lost'),
    (tagged('new {a}'), '', 'critique_empty'),
    (tagged('new {a}'), '<think>Bad.</think> ', 'critique_empty'),
  ],
)
def test_what_is_rejected_is_counted_and_never_played(tmp_path, edit, critique, reason):
  programs, critic = Programs(_stars), Script(lambda _: edit, lambda _: critique)
  last, final, rounds = _run(tmp_path, programs, critic, prompt='go {a}')
  assert [p.text for p in last.prompts] == ['go {a}'] and {p for p, _, _ in programs.played} == {'go {a}'}
  assert [r.rejected for r in rounds[1:]] == [{r: 2 * (r == reason) for r in REASONS}] * 2
  assert final.best == final.first


def test_a_prompt_of_the_longest_length_and_a_duplicate(tmp_path):
  text = 'x' * 37 + '{a}'
  last, _, rounds = _run(tmp_path, Programs(_stars), Script(lambda _: tagged(text)), prompt='go {a}', rounds=1)
  assert [p.text for p in last.prompts] == ['go {a}', text]
  assert rounds[1].rejected['duplicate'] == 1


def test_one_lost_reply_costs_one_candidate(tmp_path, caplog):
  replies = iter([None, *['Bad.'] * 9])
  last, _, _ = _run(tmp_path, Programs(_stars), Script(_numbered(), lambda _: next(replies)), rounds=1)
  assert len(last.prompts) == 2 and last.rejected['critique_lost'] == 1 and last.best.number == 1
  assert [text for text in caplog.messages if 'the critic did not answer the request for critique 0' in text]


def test_attempts_that_fail_count_as_the_score_of_failures(tmp_path):
  programs = Programs(lambda prompt, number: None if '*' in prompt and number % 2 else 0.5)
  last, _, _ = _run(tmp_path, programs, Script(_numbered()), rounds=1)
  assert last.best.number == 0 and last.prompts[1].score.failed == 2 and last.prompts[1].score.error == 'it broke'
  assert last.prompts[1].score.mean == 0.25
  with pytest.raises(UserError, match=r'^all 4 attempts with the first prompt failed; the first with: it broke$'):
    _run(tmp_path, Programs(lambda *_: None), Script(_numbered()), name='k')


class _Killed(Exception):
  pass


class _Ends:
  """Journals end the process after so many results."""

  def __init__(self, tmp_path, name, results):
    self._journal, self._left = Journal(tmp_path / name, {}), results

  def find(self, key):
    return self._journal.find(key)

  def add(self, key, result):
    if not self._left:
      raise _Killed
    self._left -= 1
    self._journal.add(key, result)


def _deterministic(prompt):
  return tagged(f'{prompt}{"*-"[len(prompt) % 2]}')


def test_a_search_that_was_killed_anywhere_ends_the_same_and_repeats_nothing_that_was_stored(tmp_path):
  def critique(text):
    return f'Bad {len(text)} {text[-300:].count("0")}.'

  asked = Script(_deterministic, critique)
  programs = Programs(_stars)
  whole = _run(tmp_path, programs, asked)
  stored = [json.loads(line)[0] for line in (tmp_path / 'j').read_text().splitlines()[1:]]
  assert len(stored) == len(set(stored)) > 10
  for at in range(len(stored)):
    name = f'j{at}'
    with pytest.raises(_Killed):
      Search(settings(), _Ends(tmp_path, name, at), Programs(_stars), Script(_deterministic, critique), ranges()).run(
        'go', lambda _: None
      )
    again, script = Programs(_stars), Script(_deterministic, critique)
    resumed = _run(tmp_path, again, script, name=name)
    assert resumed[:2] == whole[:2] and resumed[2] == whole[2], at
    assert (tmp_path / name).read_text() == (tmp_path / 'j').read_text()
    kept = stored[:at]
    assert len(script.critiques) == len(asked.critiques) - sum(k.startswith('critique/') for k in kept)
    assert len(script.edits) == len(asked.edits) - sum(k.startswith('edit/') for k in kept)
    scored = sum(k.startswith('score/') for k in kept)
    assert sum(tag == 'Val' and n < 14 for _, tag, n in again.played) == 4 * (len(whole[0].prompts) - scored)
  finished, script = Programs(_stars), Script(_deterministic, critique)
  assert _run(tmp_path, finished, script)[:2] == whole[:2]
  assert not finished.played and not script.critiques and not script.edits


def test_scores_and_standard_errors():
  score = Score.of([[attempt(1.0), attempt(0.0)], [attempt(2.0), attempt(0.0, failed=True)], [attempt(0.0)] * 2])
  assert score.tasks == (0.5, 1.0, 0.0) and score.mean == 0.5
  assert score.standard_error == pytest.approx(0.5 / math.sqrt(3))
  assert (score.attempts, score.successes, score.failed, score.error) == (6, 2, 1, 'it broke')
  assert math.isnan(standard_error([1.0])) and standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_the_critic_is_asked_a_few_at_a_time(tmp_path):
  sizes = []

  class Speaker:
    def replies(self, chats):
      sizes.append(len(chats))
      return [TextReply('Bad.')] * len(chats)

  _run(tmp_path, Programs(_stars), Critic(Speaker(), 2), branches=5, rounds=1)
  assert sizes == [2, 2, 1] * 2
