"""Makes the built-in model: a small Qwen2 trained on noisy demonstrations of FrozenLake, Sokoban and Bandit.

python main.py --mode=sft --config=configs/sft_tiny.py

2026-11-28, seed 0: 32 minutes on one core of an AMD EPYC that other work was using as well. Success on 256 held-out
levels of each game (Sokoban's are 379 to 634) at temperature 0.5 and greedy: FrozenLake 0.306 and 0.270, Sokoban 0.650
and 0.699, Bandit 0.987 and 1.000.
"""

from configs import default


def get_config():
  """Fresh weights and a fresh tokenizer; a third of the turns is random, and most turns are cut after one action."""
  config = default.get_config()
  config.sft.output = 'ragen_jax/models/tiny'
  config.sft.from_scratch = True
  config.sft.tags = ('FrozenLake', 'SimpleSokoban', 'Bandit')
  config.sft.levels = (16_000, 12_000, 500)
  config.sft.noise = 0.35
  config.sft.timid = 0.6
  config.sft.hurry = 0.5
  config.sft.actions_per_turn = 2
  config.sft.value_coef = 1.0
  config.sft.steps = 2600
  config.sft.batch_size = 64
  config.sft.learning_rate = 3e-3
  config.sft.val_fraction = 0.0
  config.sft.skip_held_out_of = (
    'bandit_grpo', 'bandit_ppo', 'bandit_starpo_s', 'frozenlake_grpo', 'frozenlake_ppo', 'frozenlake_starpo_s',
    'frozenlake_vision_ppo', 'sft_frozenlake', 'sft_sokoban', 'sokoban_grpo', 'sokoban_ppo', 'sokoban_starpo_s',
    'sokoban_vision_ppo',
  )  # fmt: skip
  config.eval.tags = ('FrozenLake', 'SimpleSokoban', 'Bandit')
  config.eval.groups = 768
  return config
