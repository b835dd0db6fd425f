"""Episodes with fixed replies: rewards, ends and metrics are those that RAGEN's rules give, worked out by hand.

RAGEN is `mll-lab-nu/RAGEN` at 20daedc; each part names the files that hold its rules. Where this project changed a
rule, the docs page of the environment says so, and the test sets the option that restores it, or has a case that both
decide alike. Replies are read as `es_manager.py` and `ctx_manager.py` do: without a valid answer a turn has the penalty
-0.1, and the environment does not move.
"""

from __future__ import annotations

import importlib.util

import pytest

from ragen_jax import build
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.envs.dataset.sandbox import Sandbox
from ragen_jax.models import presets
from tests.support import alfworld, lean_server, webshop_server
from tests.support.configs import small_config
from tests.support.datasets import write_lines
from tests.support.speakers import ScriptedText, context_settings, limits

RAMBLING = 'I think it is 18.'


@pytest.fixture(scope='module')
def tokenizer():
  return ChatTokenizer(presets.resolve('tiny', ''))


def play(tokenizer, tag, options, *answers):
  """The episode of a shipped tag with changed options, and its metrics. An answer is written as a whole reply."""
  config = small_config({f'envs.{tag}.{name}': value for name, value in options.items()})
  (spec,) = build.env_specs(config, (tag,), (1,))
  context = ContextManager(tokenizer, [spec], context_settings())
  replies = [x if x is RAMBLING else f'<think>hm</think><answer>{x}</answer>' for x in answers]
  bounds = limits(max_turns=spec.budget.max_turns, max_context=20_000)
  (episode,) = AgentProxy(EnvStateManager([spec], 1), context, bounds).rollout(ScriptedText(replies), 0).episodes
  return episode, {name.rpartition('/')[2]: x for name, x in episode_metrics([episode], 1, 'x').items()}


def rewards(episode):
  """Of the executed actions, and the penalty of each turn."""
  return [x for turn in episode.turns for x in turn.rewards], [turn.penalty for turn in episode.turns]


def subset(metrics, **expected):
  """Whether the metrics have these values."""
  assert {name: metrics[name] for name in expected} == pytest.approx(expected)


# -- questions (ragen/env/metamathqa/env.py, ragen/env/static/utils.py) ------------------------------------------------

PROBLEM = {'query': 'How many?', 'response': '2 + 16 = 18. The answer is: 1,0 00 Eggs', 'original_question': 'How?'}


def metamathqa(tmp_path, **options):
  """RAGEN's rule: equality in lower case and without white space with what follows 'The answer is: '."""
  path = write_lines(tmp_path / 'q.jsonl', [PROBLEM])
  return {'hub': '', 'path': path, 'split': 'all', 'verifier': 'exact'} | options


def test_metamathqa_grades_one_answer_after_replies_of_a_wrong_form(tokenizer, tmp_path):
  episode, metrics = play(tokenizer, 'MetamathQA', metamathqa(tmp_path), RAMBLING, RAMBLING, '1,000 EGGS')
  assert rewards(episode) == ([1.0], [-0.1, -0.1, 0.0]) and episode.status is Status.SUCCESS
  subset(metrics, success=1, score=0.8, episodic_return=1, num_turns=3, num_actions=1, attempts=1)
  assert metrics['action_is_valid'] == pytest.approx(1 / 3)
  # The tag's one action an episode is one graded attempt; a comma less is another text.
  episode, metrics = play(tokenizer, 'MetamathQA', metamathqa(tmp_path), '1000 eggs')
  assert rewards(episode) == ([0.0], [0.0]) and episode.status is Status.FAILURE
  subset(metrics, success=0, score=0, num_turns=1, action_is_effective=1)
  # Five turns without an answer.
  episode, metrics = play(tokenizer, 'MetamathQA', metamathqa(tmp_path), *[RAMBLING] * 5)
  assert rewards(episode) == ([], [-0.1] * 5) and episode.status is Status.OUT_OF_TURNS
  subset(metrics, success=0, score=-0.5, num_actions=0, truncated=1)


def test_metamathqa_halves_the_reward_with_each_attempt(tokenizer, tmp_path):
  options = metamathqa(tmp_path, attempts=4, max_actions=5)
  episode, metrics = play(tokenizer, 'MetamathQA', options, '18', RAMBLING, '1000', '1,000 eggs')
  assert rewards(episode) == ([0.0, 0.0, 0.25], [0.0, -0.1, 0.0, 0.0]) and episode.status is Status.SUCCESS
  subset(metrics, success=1, episodic_return=0.25, score=0.15, num_actions=3, attempts=3)


def test_gsm8k_has_the_number_after_the_signs_as_gold(tokenizer, tmp_path):
  path = write_lines(tmp_path / 'q.jsonl', [{'question': 'How many?', 'answer': 'First 3 #1.\n#### 1,234'}])
  options = {'hub': '', 'hub_options': {}, 'path': path}
  for answer, reward in (('1234', 1.0), ('The answer is 1,234.', 1.0), ('3', 0.0), ('-1234', 0.0)):
    episode, metrics = play(tokenizer, 'GSM8K', options, answer)
    assert rewards(episode) == ([reward], [0.0])
    subset(metrics, success=reward, num_turns=1, attempts=1)


# -- search (ragen/env/search/{env,reward}.py) -------------------------------------------------------------------------


def search_qa(tmp_path, gold='Ada Lovelace', **options):
  path = write_lines(tmp_path / 'q.jsonl', [{'question': 'Who wrote the first program?', 'answer': gold}])
  return {'hub': '', 'hub_options': {}, 'path': path} | options


@pytest.mark.parametrize(
  ('gold', 'answer', 'reward'),
  [
    # SQuAD's normalisation: lower case, no punctuation, no articles, single blanks.
    ('Ada Lovelace', 'The  ADA lovelace!', 1.0),
    (['Byron', 'Ada Lovelace'], 'ada lovelace', 1.0),
    # 1 of 1 word is right, and 1 of 2 is there: F1 = 2 * 1 * 1/2 / (1 + 1/2).
    ('Ada Lovelace', 'Ada', 2 / 3),
    # 2 of 7 words are right, and both are there: 2 * 2/7 / (2/7 + 1) = 4/9.
    ('Ada Lovelace', 'It was Ada Lovelace, daughter of Byron', 4 / 9),
    # 1 of 7 words, 1 of 2: 2 * 1/14 / (9/14) = 2/9, below 0.3.
    ('Ada Lovelace', 'Ada, daughter of Lord Byron of London', 0.0),
    # yes and no are right alone.
    ('yes', 'Yes.', 1.0),
    ('yes', 'yes it is', 0.0),
  ],
)
def test_searchqa_pays_an_exact_match_or_the_f1_from_0_3(tokenizer, tmp_path, gold, answer, reward):
  options = search_qa(tmp_path, gold)
  episode, metrics = play(tokenizer, 'SearchQAMock', options, 'search[first program]', f'finish[{answer}]')
  assert rewards(episode) == ([0.0, pytest.approx(reward)], [0.0, 0.0])
  # RAGEN counts every payment as won; here an answer that is partly right is none (docs/search.md).
  assert episode.status is (Status.SUCCESS if reward == 1 else Status.FAILURE)
  assert 'first program' in episode.turns[1].observation
  subset(metrics, success=float(reward == 1), search_calls=1, invalid_calls=0, num_actions=2, attempts=1)


def test_searchqa_finds_passages_and_takes_other_text_for_an_answer_if_asked(tokenizer, tmp_path):
  pytest.importorskip('bm25s', reason='needs requirements-data.txt')
  corpus = [{'id': str(i), 'contents': f'"{x}"\n{x} was here.'} for i, x in enumerate(('Ada Lovelace', 'Byron'))]
  tools = {
    'search': {'retriever': f'bm25:{write_lines(tmp_path / "corpus.jsonl", corpus)}', 'top_k': 1},
    'finish': {'free_text_is_answer': True},
  }
  options = search_qa(tmp_path) | {f'tool_options.{name}.{x}': y for name, own in tools.items() for x, y in own.items()}
  episode, metrics = play(tokenizer, 'SearchQA', options, 'search[lovelace]', RAMBLING, 'Ada Lovelace')
  assert rewards(episode) == ([0.0, 1.0], [0.0, -0.1, 0.0]) and episode.status is Status.SUCCESS
  assert 'Ada Lovelace was here.' in episode.turns[1].observation and 'Byron' not in episode.turns[1].observation
  subset(metrics, success=1, score=0.9, search_calls=1, num_turns=3)


def test_searchqa_that_only_searches_ends_with_the_turns(tokenizer, tmp_path):
  episode, metrics = play(tokenizer, 'SearchQAMock', search_qa(tmp_path), *[f'search[{i}]' for i in range(5)])
  assert rewards(episode) == ([0.0] * 5, [0.0] * 5) and episode.status is Status.OUT_OF_TURNS
  subset(metrics, success=0, score=0, search_calls=5, truncated=1)


# -- programs (ragen/env/deepcoder/{env,utils}.py) ---------------------------------------------------------------------

READS = {'tests': [{'input': f'{a} {b}\n', 'output': f'{a + b}\n'} for a, b in ((1, 2), (2, 2), (5, 0))]}
CALLED = {
  'tests': [{'input': f'{a}', 'output': f'{a * a}', 'testtype': 'functional'} for a in (2, 3, 0)],
  'metadata': {'func_name': 'square'},
}


@pytest.fixture(scope='module')
def sandbox():
  try:
    Sandbox().check()
  except ValueError as e:
    pytest.skip(f'needs bubblewrap: {e}')


@pytest.mark.parametrize(
  ('score', 'row', 'program', 'passed', 'paid'),
  [
    ('share', READS, 'print(sum(map(int, input().split())))', 3, 1.0),
    # 2 * 2 = 2 + 2, the others differ.
    ('share', READS, 'a, b = map(int, input().split())\nprint(a * b)', 1, 1 / 3),
    ('share', CALLED, 'class Solution:\n  def square(self, x):\n    return x * x', 3, 1.0),
    # 2 + 2 and 0 + 0 are squares, too.
    ('share', CALLED, 'def square(x):\n  return x + x', 2, 2 / 3),
    ('share', CALLED, 'def square(x):\n  return y', 0, 0.0),
    # This project's default (docs/programs.md).
    ('all', CALLED, 'def square(x):\n  return x + x', 2, 0.0),
  ],
)
def test_deepcoder_pays_the_share_of_passed_tests(tokenizer, tmp_path, sandbox, score, row, program, passed, paid):
  path = write_lines(tmp_path / 'q.jsonl', [{'problem': 'Do it.', **row}])
  options = {'path': path, 'split': 'all', 'workers': 1, 'verifier_options.score': score}
  episode, metrics = play(tokenizer, 'DeepCoder', options, program)
  assert rewards(episode) == ([pytest.approx(paid)], [0.0])
  assert episode.status is (Status.SUCCESS if passed == 3 else Status.FAILURE)
  subset(metrics, success=float(passed == 3), tests_passed=passed / 3, num_actions=1, num_turns=1)


# -- shopping (ragen/env/webshop/env.py) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('reward', 'actions', 'paid', 'status', 'own'),
  [
    # What is not on the page changes nothing and costs an action; a purchase that fits pays 1.
    (
      'success', ['search[red]', 'click[B09]', 'click[B01]', 'click[large]', 'click[buy now]'], [0, 0, 0, 0, 1],
      Status.SUCCESS, {'raw_reward': 1, 'purchases': 1, 'impossible': 1, 'r_type': 1, 'action_is_effective': 4 / 5},
    ),
    # Type 1; of attribute, option and price without the option: 1 * (1 + 0 + 1) / 3.
    (
      'success', ['search[red]', 'click[B01]', 'click[buy now]'], [0, 0, 0], Status.FAILURE,
      {'raw_reward': 2 / 3, 'purchases': 1, 'impossible': 0, 'r_type': 1, 'action_is_effective': 1},
    ),
    ('raw', ['search[red]', 'click[B01]', 'click[buy now]'], [0, 0, 2 / 3], Status.FAILURE, {'raw_reward': 2 / 3}),
    # Type 0: 0 * (...).
    ('raw', ['search[hat]', 'click[B03]', 'click[buy now]'], [0, 0, 0], Status.FAILURE, {'raw_reward': 0, 'r_type': 0}),
    # Nine actions are the tag's.
    (
      'success', ['search[red]', 'click[back to search]'] * 4 + ['search[red]', 'click[B01]'], [0] * 9,
      Status.OUT_OF_ACTIONS, {'raw_reward': 0, 'purchases': 0, 'truncated': 1, 'num_actions': 9},
    ),
  ],
)  # fmt: skip
def test_webshop_pays_a_purchase_that_fits_in_all_points(tokenizer, reward, actions, paid, status, own):
  with webshop_server.serve() as server:
    options = {'url': server.url, 'goals': 1, 'split': 'all', 'reward': reward}
    episode, metrics = play(tokenizer, 'WebShop', options, *actions)
  assert rewards(episode)[0] == pytest.approx(paid) and episode.status is status
  subset(metrics, success=float(status is Status.SUCCESS), **own)


# -- households (ragen/env/alfworld/env.py) ----------------------------------------------------------------------------


def test_alfworld_pays_a_fulfilled_task_only(tokenizer, tmp_path):
  if any(importlib.util.find_spec(x) is None for x in ('textworld', 'fast_downward')):
    pytest.skip('needs the engine: pip install -r requirements-alfworld.txt')
  task = 'pick_and_place_simple'
  plan = alfworld.WALKTHROUGHS[task](0)
  alfworld.write_game(tmp_path / 'train', task, 0, walkthrough=plan)
  options = {'path': str(tmp_path), 'processes': 1}
  # A command that is not admissible is spent, and nothing happens; RAGEN pays 10 for the task.
  episode, metrics = play(tokenizer, 'ALFWorld', options, 'dance', RAMBLING, *plan)
  assert rewards(episode) == ([0.0] * len(plan) + [1.0], [0.0, -0.1] + [0.0] * len(plan))
  assert episode.turns[1].observation.startswith('Nothing happens.') and episode.status is Status.SUCCESS
  share = len(plan) / (len(plan) + 1)
  subset(metrics, success=1, score=0.9, admissible_share=share, **{f'success_{task}': 1})
  episode, metrics = play(tokenizer, 'ALFWorld', options, *['look'] * 50)
  assert rewards(episode)[0] == [0.0] * 50 and episode.status is Status.OUT_OF_ACTIONS
  subset(metrics, success=0, score=0, num_actions=50, truncated=1, **{f'success_{task}': 0})


# -- theorems (ragen/env/lean/env.py) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('actions', 'paid', 'success', 'own'),
  [
    # -0.1 an action; +1 accepted, which here is progress; -1 rejected; +10 done.
    (['constructor', 'oops', 'trivial', 'rfl'], [0.9, -1.1, 0.9, 9.9], True, {'accepted': 3, 'progress': 2}),
    # A tactic that does nothing is accepted; RAGEN pays it, here it only costs (docs/lean.md).
    (['skip'] * 15, [-0.1] * 15, False, {'accepted': 15, 'progress': 0, 'truncated': 1}),
    (['slowly', 'sorry'], [-1.1, -1.1], False, {'accepted': 0, 'timeouts': 1}),
  ],
)
def test_lean_pays_progress_and_the_proof(tokenizer, tmp_path, actions, paid, success, own):
  path = write_lines(tmp_path / 'q.jsonl', [{'formal_statement': 'theorem both : True ∧ 2 = 2 := by'}])
  with lean_server.serve() as server:
    options = {'path': path, 'split': 'all', 'url': server.url, 'backoff_s': 0.01}
    ended = success or len(actions) == 15
    episode, metrics = play(tokenizer, 'Lean', options, *actions, *[RAMBLING] * (0 if ended else 15 - len(actions)))
  assert rewards(episode)[0] == pytest.approx(paid) and episode.success == success
  subset(metrics, success=float(success), episodic_return=sum(paid), tactics=len(actions), **own)
