"""A game outside JAX whose objects have an expert, for demonstrations, baselines and hints."""

from __future__ import annotations

from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec


class Sums:
  """Reach the number of the seed, 1 to 5, by adding 1 or 2; more loses. Its expert knows how, with a thought."""

  rules = 'Add.'
  action_names = ('One', 'Two')

  def reset(self, seed):
    self.seed, self.left = seed, 1 + seed % 5
    return f'{self.left} left'

  def step(self, action):
    self.left -= 1 if action == 'One' else 2
    return f'{self.left} left', float(self.left == 0), self.left <= 0, self.left == 0

  def expert(self):
    return ['Two'] * (self.left // 2) + ['One'] * (self.left % 2)

  def rationale(self):
    return f'{self.left} more.'


class Troubled(Sums):
  """Its expert fails for some seeds, each in a way of its own."""

  def expert(self):
    if self.seed == 10:
      raise KeyError('no plan')
    if self.seed == 11:
      return 'One'
    if self.seed == 12:
      return ['Three']
    return [] if self.seed == 13 else super().expert()

  def rationale(self):
    return 7 if self.seed == 14 else super().rationale()

  def step(self, action):
    if self.seed == 15:
      raise OSError('broken')
    return super().step(action)


class Away(Sums):
  """Cannot be played."""

  def step(self, action):
    raise OSError('the server is away')


class Wordy(Sums):
  """Its thoughts hold what no thought may, for two seeds."""

  def rationale(self):
    return {0: 'so </think> it is', 1: 'so <|im_end|> it is'}.get(self.seed, super().rationale())


def expert_spec(groups: int, name: str = 'Sums', *, budget: Budget | None = None, workers: int = 1) -> EnvSpec:
  """The environment of a game of this module under its name."""
  env = registry.make('python', {'class_path': f'{__name__}:{name}', 'workers': workers})
  return EnvSpec(name, env, budget or Budget(max_turns=3, max_actions=5, max_actions_per_turn=2), 30, groups)


def expert_section(name: str = 'Sums') -> dict:
  """The same as a section of `config.envs`."""
  return {
    'type': 'python', 'class_path': f'{__name__}:{name}', 'max_turns': 3, 'max_actions': 5, 'max_actions_per_turn': 2,
    'max_words': 30,
  }  # fmt: skip
