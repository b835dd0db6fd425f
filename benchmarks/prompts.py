"""How well models follow prompts: replies of the right form, for games, forms of replies, and wordings of the request.

  python benchmarks/prompts.py --model=qwen2.5-0.5b-instruct=DIR --model=smollm2-135m=DIR
  python benchmarks/prompts.py --quick      the built-in model, one game, a few episodes

DIR is the folder of a Hugging Face checkpoint; 'NAME=DIR' uses the settings of the preset NAME. Each row of the table
plays the same held-out levels and has, for the first turn and for later ones:

  form      share of replies of the form that is asked for
  valid     share of replies of the form whose actions all exist
  cut       share of replies that ended at --tokens
  tokens    mean tokens of a reply
  success   share of episodes that succeed

The JSON also has how often each action was the first of an episode, in all and by the first action of the prompt's
example; some replies, and some that are not valid.

Rows are appended to --output as they are measured; rows that it has are not measured again.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

import ragen_jax  # noqa: E402
from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax import build, build_agents  # noqa: E402
from ragen_jax.agent.episode import Episode  # noqa: E402
from ragen_jax.agent.language_model import param_state  # noqa: E402
from ragen_jax.agent.templates import shown_actions  # noqa: E402
from ragen_jax.envs.spec import EnvSpec  # noqa: E402

# Requests by name; '' is that of the model's config.
WORDINGS = {
  'default': '',
  'short': 'Answer as {form} and nothing else, in at most {max_words} words.',
  'words': (
    'Write one short thought between <think> and </think>, then your actions between <answer> and </answer>, in at '
    'most {max_words} words. For example: {example}'
  ),
  'form': 'Answer in this form, in at most {max_words} words, and write nothing else:\n{form}',
  'form, example': (
    'Answer in this form, in at most {max_words} words, and write nothing else:\n{form}\n'
    'An example of a whole answer:\n{example}'
  ),
  'example, form': (
    'An example of a whole answer:\n{example}\n'
    'Answer in exactly this form, in at most {max_words} words, and write nothing else:\n{form}'
  ),
  'example last': (
    'Answer in the form {form}, in at most {max_words} words, and write nothing else. An example:\n{example}'
  ),
  'actions last': (
    'Answer in this form, in at most {max_words} words, and write nothing else:\n{form}\n'
    'An example of a whole answer:\n{example}\nThe only actions are {actions}.'
  ),
  'actions, example': (
    'Answer in this form, in at most {max_words} words, and write nothing else:\n{form}\n'
    'The only actions are {actions}.\nAn example of a whole answer:\n{example}'
  ),
  'actions, example, stop': (
    'Answer in this form, in at most {max_words} words:\n{form}\n'
    'The only actions are {actions}.\nAn example of a whole answer, behind which nothing else is written:\n{example}'
  ),
  'example only': 'Answer like this, in at most {max_words} words, and write nothing else:\n{example}',
  'format': (
    'Format of your answer, at most {max_words} words:\n{form}\nAllowed actions: {actions}\n'
    'Example of a whole answer:\n{example}\nWrite one answer in this format and nothing else.'
  ),
  'two parts': (
    'Your reply has all these tags, in this order:\n{form}\n'
    'Write at most {max_words} words, and stop after the last tag. A complete reply looks like this:\n{example}'
  ),
}
GAMES = ('Bandit', 'FrozenLake', 'SimpleSokoban')
FORMS = ('free_think', 'no_think')
FIRST_LEVEL = 3_000_000


def measure(model: str, game: str, form: str, wording: str, args: argparse.Namespace, policy: Any) -> dict[str, Any]:
  """One row: plays `args.episodes` episodes of one game."""
  config = _config(model, game, form, args)
  if WORDINGS[wording]:
    config.agent.request = WORDINGS[wording]
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as store, build_agents.open_players(config, policy, store) as players:
    evaluator = build.make_evaluator(config, policy, players['eval'])
    episodes, _, _, _ = evaluator.episodes(param_state(policy.model))
  return {
    'model': model.partition('=')[0], 'game': game, 'form': form, 'wording': wording,
    'temperature': args.temperature, 'request': config.agent.request, 'episodes': args.episodes, 'seed': args.seed,
    'max_response_tokens': args.tokens, 'max_words': config.envs[game].max_words, 'turns': args.turns,
    'seconds': round(time.monotonic() - start, 1), 'hardware': hardware(), 'date': time.strftime('%Y-%m-%d'),
    **summary(episodes, args.tokens),
    'first_actions_by_example': by_example(episodes, build.env_specs(config, (game,), (1,))[0]),
  }  # fmt: skip


def summary(episodes: list[Episode], limit: int) -> dict[str, Any]:
  """The figures of a row; those of 'later' turns are None if there are none."""
  result = {}
  for name, turns in (
    ('first', [e.turns[0] for e in episodes if e.turns]),
    ('later', [turn for e in episodes for turn in e.turns[1:]]),
  ):
    if not turns:
      result[name] = None
      continue
    result[name] = {
      'replies': len(turns),
      'form': round(float(np.mean([bool(t.sections) for t in turns])), 3),
      'valid': round(float(np.mean([t.valid for t in turns])), 3),
      'cut': round(float(np.mean([t.tokens >= limit and not t.closed for t in turns])), 3),
      'tokens': round(float(np.mean([t.tokens for t in turns])), 1),
    }
  firsts = collections.Counter(e.turns[0].actions[0] for e in episodes if e.turns and e.turns[0].actions)
  result['first_actions'] = dict(firsts.most_common())
  result['success'] = round(float(np.mean([e.success for e in episodes])), 3)
  result['score'] = round(float(np.mean([e.score for e in episodes])), 3)
  result['samples'] = [e.turns[0].reply[:200] for e in episodes[:3] if e.turns]
  result['invalid'] = [turn.reply[:200] for e in episodes for turn in e.turns if not turn.valid][:6]
  return result


def by_example(episodes: list[Episode], spec: EnvSpec) -> dict[str, dict[str, int]]:
  """First action of the example in the first prompt -> first action of the episode -> number of episodes."""
  found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  for turn in (e.turns[0] for e in episodes if e.turns and e.turns[0].actions):
    (shown, *_), _ = shown_actions(spec, 0, turn.observation)
    found[shown][turn.actions[0]] += 1
  return {shown: dict(found[shown].most_common()) for shown in sorted(found)}


def _config(model: str, game: str, form: str, args: argparse.Namespace) -> Any:
  preset, _, path = model.partition('=')
  config = ragen_jax.load_config(f'{"bandit" if game == "Bandit" else "frozenlake"}_ppo:{preset}')
  fields = {
    'model.path': path, 'train.tags': (game,), 'eval.tags': (game,), 'eval.tag_groups': (),
    'eval.groups': args.episodes, 'eval.group_size': 1, 'eval.first_level': FIRST_LEVEL + args.seed * 100_000,
    'eval.temperature': args.temperature, 'eval.greedy_too': False, 'agent.format': form, 'model.dtype': 'float32',
    'agent.max_response_tokens': args.tokens, 'agent.rows_in_flight': args.episodes, 'train.groups': 8,
    'train.group_size': 4, 'optimizer.mini_batch_size': 32,
  }  # fmt: skip
  if args.max_words:
    fields[f'envs.{game}.max_words'] = args.max_words
  if args.turns:
    fields[f'envs.{game}.max_turns'] = min(args.turns, config.envs[game].max_turns)
  with config.unlocked():
    for field, value in fields.items():
      *sections, name = field.split('.')
      at = config
      for section in sections:
        at = at[section]
      at[name] = value
  return config


def _table(rows: list[dict[str, Any]]) -> str:
  columns = (
    'Model',
    'Game',
    'Form',
    'Wording',
    'Words',
    'T',
    'Form, first / later',
    'Valid',
    'Cut',
    'Tokens',
    'Success',
  )
  lines = [f'| {" | ".join(columns)} |', '|' + '---|' * len(columns)]
  for row in rows:

    def both(key: str, row: dict[str, Any] = row) -> str:
      return ' / '.join('-' if row[turn] is None else f'{row[turn][key]:.2f}' for turn in ('first', 'later'))

    names = (row[key] for key in ('model', 'game', 'form', 'wording', 'max_words', 'temperature'))
    cells = (*names, *map(both, ('form', 'valid', 'cut', 'tokens')), f'{row["success"]:.2f}')
    lines.append(f'| {" | ".join(map(str, cells))} |')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', action='append', default=[], metavar='PRESET=DIR')
  parser.add_argument('--game', action='append', default=[], help=f'default: {", ".join(GAMES)}')
  parser.add_argument('--form', action='append', default=[], help=f'default: {", ".join(FORMS)}')
  parser.add_argument('--wording', action='append', default=[], choices=WORDINGS, help='default: default')
  parser.add_argument('--temperature', type=float, default=1.0)
  parser.add_argument('--episodes', type=int, default=64)
  parser.add_argument('--turns', type=int, default=0, help='the most turns of an episode; 0: those of the game')
  parser.add_argument('--tokens', type=int, default=80, help='the most tokens of a reply')
  parser.add_argument('--max_words', type=int, default=0, help='words that the request names; 0: those of the game')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'prompts.json')
  parser.add_argument('--quick', action='store_true')
  args = parser.parse_args()
  if args.quick:
    args.model, args.game, args.form, args.episodes, args.turns = ['tiny'], ['FrozenLake'], ['free_think'], 8, 2
    args.output = ROOT / 'runs' / 'quick' / 'prompts.json'
  if not args.model:
    parser.error('--model=PRESET=DIR is missing')
  jax.config.update('jax_compilation_cache_dir', str(ROOT / 'runs' / 'prompts_cache'))
  args.output.parent.mkdir(parents=True, exist_ok=True)
  rows = json.loads(args.output.read_text()) if args.output.exists() else []
  keys = (
    'model', 'game', 'form', 'wording', 'temperature', 'episodes', 'seed', 'turns', 'max_response_tokens', 'max_words',
  )  # fmt: skip
  for model in args.model:
    policy = None
    for game in args.game or GAMES:
      for form in args.form or FORMS:
        for wording in args.wording or ['default']:
          key = (
            model.partition('=')[0], game, form, wording, args.temperature, args.episodes, args.seed, args.turns,
            args.tokens, _config(model, game, form, args).envs[game].max_words,
          )  # fmt: skip
          if any(tuple(row[k] for k in keys) == key for row in rows):
            continue
          policy = policy or ragen_jax.load_policy(_config(model, game, form, args))
          rows.append(measure(model, game, form, wording, args, policy))
          args.output.write_text(json.dumps(rows, indent=1) + '\n')
          print(_table(rows[-1:]).splitlines()[-1], rows[-1]['seconds'], 's', flush=True)
  print(_table(rows))


if __name__ == '__main__':
  main()
