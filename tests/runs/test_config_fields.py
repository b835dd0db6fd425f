"""Every field of the config has one role, and the lists that follow from the roles are the intended ones."""

from __future__ import annotations

import collections
import fnmatch

import pytest

from configs import default, frozenlake_ppo
from ragen_jax.runs import config_fields
from ragen_jax.runs.config_fields import ROLES, fields_of, flatten, free_in_training, has_effect, role_of

CONFIG = default.get_config().to_dict()
FIELDS = {name for name in flatten(CONFIG) if not name.startswith('envs.')} | {'envs.*'}


def test_every_field_has_a_role():
  missing = FIELDS - dict(config_fields.names()).keys()
  assert not missing, f'give these fields a role in ragen_jax/runs/config_fields.py: {", ".join(sorted(missing))}'


def test_every_role_is_of_a_field_that_exists():
  assert dict(config_fields.names()).keys() - FIELDS == set()


def test_what_earlier_versions_did_is_what_the_defaults_do():
  flat = flatten(CONFIG)
  for name, value in config_fields.BEFORE.items():
    # Grids of symbols are the text of two games, which had the field before.
    own = {flat[field] for field in fnmatch.filter(flat, name)} - ({'grid', 'grid_coord'} if '*' in name else set())
    assert own == {value}, name
  assert not set(config_fields.REPLACED) & set(flat)


def test_a_field_has_one_role():
  counts = collections.Counter(name for name, _ in config_fields.names())
  assert [name for name, count in counts.items() if count > 1] == []


def test_every_role_is_explained():
  for role in ROLES:
    assert f'\n  {role} ' in config_fields.__doc__


def test_the_role_of_a_field():
  assert role_of('seed') == 'learning'
  assert role_of('lora.rank') == 'weights'
  assert role_of('envs.Bandit.low_reward') == role_of('envs.MyOwn.size') == 'learning'
  assert role_of('train.gruops') is None
  with pytest.raises(KeyError):
    fields_of('weight')


def test_a_longer_run_is_free_unless_the_learning_rate_depends_on_its_length():
  free, reasons = free_in_training(CONFIG)
  assert CONFIG['optimizer']['final_lr_fraction'] == 1 and 'num_iterations' in free and not reasons
  free, reasons = free_in_training(frozenlake_ppo.get_config().to_dict())
  assert 'num_iterations' not in free
  assert reasons == {'num_iterations': 'the learning rate falls over them, as optimizer.final_lr_fraction=0.2'}


@pytest.mark.parametrize(
  ('field', 'training', 'warm_start', 'export', 'effect'),
  [
    ('seed', False, False, False, True),
    ('num_iterations', True, True, True, True),
    ('compilation_cache', True, True, True, False),
    ('model.path', False, False, False, True),
    ('agent.max_context', False, False, False, True),
    ('optimizer.actor_lr', False, False, False, True),
    ('optimizer.micro_batch_size', False, False, False, False),
    ('optimizer.packing', True, True, True, False),
    ('train.groups', False, True, False, True),
    ('algorithm.lam', False, True, False, True),
    ('monitor.echo_trap', False, True, False, True),
    ('monitor.information_every', True, True, True, False),
    ('monitor.information_samples', False, True, True, False),
    ('mesh.data', True, False, True, False),
    ('model.attention', True, True, True, False),
    ('model.remat', True, True, True, False),
    ('checkpoint.keep', True, True, True, False),
    ('sft.steps', True, False, True, False),
    ('sft.output', True, True, True, False),
    ('eval.groups', False, False, True, True),
    ('eval.greedy_too', False, False, True, False),
    ('eval.endpoint', True, False, True, False),
    ('export.output', True, True, True, False),
    ('plan.devices', True, True, True, False),
  ],
)
def test_what_may_change(field, training, warm_start, export, effect):
  """Against the lists that were written by hand before there were roles."""
  assert (field in free_in_training(CONFIG)[0]) == training
  assert (field in config_fields.free_in_warm_start()) == warm_start
  assert (field in config_fields.free_in_export(CONFIG)) == export
  assert has_effect(field) == effect


def test_fields_of_other_versions_follow_their_section():
  assert not has_effect('logging.old_name') and not has_effect('sft.old_name')
  assert has_effect('train.old_name') and has_effect('eval.old_name') and has_effect('old_name')


def test_what_training_reads():
  shown = config_fields.read_by_training(CONFIG)
  assert not shown.keys() & {'sft', 'export', 'plan'} and shown['train'] == CONFIG['train']
  assert list(shown['envs']) == ['FrozenLake']


def test_values_of_a_role_and_flat_names():
  config = {'a': 1, 'b': {'c': (2, 3), 'd': {}}}
  assert flatten(config) == {'a': 1, 'b.c': (2, 3), 'b.d': {}}
  assert config_fields.select(CONFIG, 'devices') == (-1, 1, 1)
  with pytest.raises(ValueError, match='expected a dict, got list'):
    flatten([])
