"""Episodes that nobody played, for tests of where they are kept and shown."""

from __future__ import annotations

import numpy as np

from ragen_jax.viewer.store import EpisodeWriter

# What a policy could write to break out of the page; where it ran, the title would change.
ATTACKS = (
  "</script><script>document.title='broken'</script>",
  '<img src=x onerror="document.title=\'broken\'">',
  '<!--<script>{{details}} {{data}} \\u003c \' " & &lt; \u2028',
  '\x00\x1b[2J\u202e\x7f</pre></textarea></title><svg/onload="document.title=\'broken\'">{{policy}}',
)


# Of a reply with both sections.
DESCRIPTIONS = [
  {
    'section': 'observation', 'score': 0.5, 'reward': 0.25,
    'parts': [
      ('The ', '', ''), ('goal is here', 'right', ''), ('; the ', '', ''), ('hole is near', 'half', 'the hole is far'),
    ],
    'missing': ['the hole is behind'],
  },
  {'section': 'prediction', 'score': None, 'reward': None, 'parts': [(ATTACKS[1], 'wrong', '')], 'missing': []},
]  # fmt: skip


def episode_record(
  *,
  step: int = 0,
  split: str = 'val',
  tag: str = 'FrozenLake',
  level: int = 0,
  member: int = 0,
  turns: int = 2,
  tokens: int = 6,
  status: str = 'failure',
  score: float = 0.0,
  text: str = 'I think so.',
  described: bool = False,
  seen: int = 0,
  rng: np.random.Generator | None = None,
) -> dict:
  """An episode as `viewer.records.episode_records` gives it, made up."""
  rng = rng or np.random.default_rng(level)

  def picture(at):
    image = np.full((64, 64, 3), 220, np.uint8)
    image[:16, 16 * (at % 4) : 16 * (at % 4) + 16] = (220, 110, 40)
    image[48:, 16 * (level % 4) : 16 * (level % 4) + 16] = (70, 170, 100)
    return image

  def image(number):
    return np.full((32, 32, 3), 10 + number, np.uint8)

  def numbers(scale):
    return [float(f'{x:.4g}') for x in rng.normal(size=tokens) * scale]

  def turn(at):
    pieces = [text, *[' so'] * (tokens - 3), '</think><answer>Left</answer>', '<|im_end|>']
    return {
      'prompt': f'<|im_start|>user\nTurn {at + 1}<|im_end|>\n<|im_start|>assistant\n', 'prompt_tokens': 12,
      'fresh': at == 0, 'forced': '<think>', 'pieces': pieces, 'logprob': [-abs(x) for x in numbers(1)],
      'entropy': [abs(x) for x in numbers(1)], 'value': numbers(0.5),
      **({'advantage': numbers(1)} if split == 'train' else {}),
      'closed': True, 'observation': f'board {at}', 'picture': picture(at), 'actions': ['Left'], 'valid': True,
      'effective': 1, 'reward': score / turns, 'penalty': 0.0, **({'descriptions': DESCRIPTIONS} if described else {}),
      **({'reply_reward': 0.75} if described else {}), **({'images': [image(k) for k in range(seen)]} if seen else {}),
    }  # fmt: skip

  learnt = {'learnt': True, 'prompts_trained': False} if split == 'train' else {}
  return {
    'step': step, 'split': split, 'tag': tag, 'level': level, 'group': level, 'member': member, 'status': status,
    'score': score, 'actions': turns, 'error': '', **learnt, 'turns': [turn(at) for at in range(turns)],
    'final_observation': 'the end', 'final_picture': picture(turns),
  }  # fmt: skip


def write_run(workdir, *, attacks=False):
  """1,000 episodes: 10 evaluations of 40 levels, sampled and greedy, and 200 of training, of two environments."""
  writer, rng = EpisodeWriter(workdir), np.random.default_rng(0)
  for step in range(0, 100, 10):
    records = []
    for split in ('val', 'val-greedy'):
      for level in range(40):
        won = level < step / 3
        records.append(
          episode_record(
            step=step,
            split=split,
            level=level,
            tag=('FrozenLake', 'Bandit')[level % 2],
            turns=4,
            tokens=30,
            rng=rng,
            status='success' if won else 'out_of_turns',
            score=1.0 if won else -0.5,
            text=f'I am at level {level} of step {step}.',
          )
        )
    writer.write('eval', step, records)
  for step in range(1, 11):
    records = [
      episode_record(
        step=step,
        split='train',
        level=10_000 + 5 * step + i // 4,
        member=i % 4,
        turns=3,
        tokens=30,
        rng=rng,
        described=step == 3,
        seen=2 * (step == 4),
      )
      for i in range(20)
    ]
    if attacks and step == 1:
      for record, attack in zip(records, ATTACKS, strict=False):
        turn = record['turns'][0]
        turn['pieces'][0] = turn['observation'] = turn['prompt'] = turn['actions'][0] = attack
        record['error'] = record['tag'] = record['final_observation'] = attack
    if step == 2:
      records[0]['learnt'] = False
    writer.write('train', step, records)
