"""GRPO on questions of your own with known answers: one JSON object a line, with the fields `question` and `answer`.

python main.py --config=configs/dataset_grpo.py:qwen2.5-0.5b-instruct --config.envs.Dataset.path=mine.jsonl

A tenth of the questions is held out for the evaluation. The verifier compares texts; other verifiers, fields and
sources are options of envs.Dataset, which docs/datasets.md describes:

--config.envs.Dataset.verifier=number --config.envs.Dataset.fields.question=problem

The same with RAGEN's MetaMathQA, or with GSM8K (pip install -r requirements-data.txt):

--config.train.tags="('MetamathQA',)" --config.eval.tags="('MetamathQATest',)"
--config.train.tags="('GSM8K',)" --config.eval.tags="('GSM8KTest',)"

The built-in model cannot answer questions. It needs a warm start on the reference answers (--mode=sft), and learns from
it little more than that this program works.
"""

from configs import frozenlake_grpo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on a data set; each held-out question is asked once."""
  config = frozenlake_grpo.get_config(model)
  config.train.tags = ('Dataset',)
  config.eval.tags = ('DatasetTest',)
  config.eval.group_size = 1
  config.sft.tags = ('Dataset',)
  config.sft.output = 'runs/dataset_sft'
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for questions and encodes them byte by byte.
    config.agent.max_context = 1024
    config.agent.max_response_tokens = 64
  else:
    # A thought about a question takes more words than a move.
    for tag in ('Dataset', 'MetamathQA', 'GSM8K'):
      config.envs[tag].max_words = 100
  return config
