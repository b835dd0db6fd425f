"""Makes the built-in hybrid: a small Qwen3.5, trained on the built-in model's kind of play.

python main.py --mode=sft --config=configs/sft_tiny_hybrid.py
"""

from configs import sft_tiny


def get_config():
  """The text model's play and tokenizer, with fewer levels and steps; one layer of two has linear attention."""
  config = sft_tiny.get_config()
  config.model.preset = 'tiny-hybrid'
  config.sft.output = 'ragen_jax/models/tiny_hybrid'
  config.sft.levels = (16_000, 3_000, 500)
  config.sft.steps = 1300
  config.sft.shape = (64, 2, 4, 1, 16, 192)
  config.sft.linear_layers = 1
  return config
