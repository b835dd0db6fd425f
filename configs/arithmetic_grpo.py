"""GRPO on sums and differences of two or three digits, which reasoning-gym generates, after a short warm start.

pip install -r requirements-data.txt
python main.py --mode=sft --config=configs/arithmetic_grpo.py
python main.py --config=configs/arithmetic_grpo.py --config.model.path=runs/arithmetic_sft

The built-in model writes numbers digit by digit. The warm start imitates reference answers; then it learns from rewards
only. A tenth of the problems is held out. The 300 steps of this warm start leave 1 % of them right (2026-11-25), too few
to learn from: they are a trial of all parts. benchmarks/data_set_learning.py has questions that the built-in model
learns.
"""

from configs import dataset_grpo


def get_config(model: str = ''):
  """Problems of two and three terms, answered without a thought."""
  config = dataset_grpo.get_config(model)
  config.envs.Dataset.generator = 'reasoning_gym:basic_arithmetic'
  # In place, because the held-out tag has the same options.
  config.envs.Dataset.generator_options.update({
    'size': 5000, 'min_terms': 2, 'max_terms': 3, 'min_digits': 1, 'max_digits': 1, 'operators': ('+', '-'),
    'allow_parentheses': False, 'allow_negation': False,
  })  # fmt: skip
  config.envs.Dataset.verifier = 'number'
  config.agent.format = 'no_think'
  config.sft.output = 'runs/arithmetic_sft'
  if config.model.preset == 'tiny':
    config.agent.max_context = 384
    config.agent.max_response_tokens = 16
    config.train.groups = 64
    config.train.group_size = 8
    config.eval.groups = 256
    config.sft.levels = (8192,)
    config.sft.steps = 300
    config.sft.learning_rate = 2e-3
  return config
