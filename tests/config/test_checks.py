"""What cannot run is refused in one line, before anything is compiled."""

from __future__ import annotations

import functools

import jax
import pytest

from ragen_jax.config import checks
from ragen_jax.config.checks import check_config, check_plan
from ragen_jax.distributed.mesh import AXES
from ragen_jax.distributed.processes import RowShare
from ragen_jax.models import presets
from ragen_jax.models.lora import LoraConfig
from tests.support.configs import assert_refused, small_config

_check = functools.partial(check_config, weights=False)


@pytest.mark.parametrize('remat', [False, True, 'elementwise', 'attention', 'auto'])
def test_every_choice_of_what_is_computed_again_is_allowed(remat):
  _check(small_config(model__remat=remat))


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('algorithm.clip_ratio_c', 0.5, r'algorithm\.clip_ratio_c=0\.5.*above 1'),
    ('algorithm.gamma', 1.5, r'algorithm\.gamma=1\.5.*between 0 and 1'),
    ('algorithm.gama', 0.9, r"^algorithm\.gama=0\.9: config\.algorithm has no field 'gama'; did you mean 'gamma'\?"),
    ('optimizer.mini_batch_size', 7, r'optimizer\.mini_batch_size=7.*divide.* 16'),
    ('optimizer.micro_batch_size', 3, r'optimizer\.micro_batch_size=3.*divide.* 8'),
    ('optimizer.micro_batch_size', -1, r'optimizer\.micro_batch_size=-1: must be at least 0'),
    ('train.tags', (), r'train\.tags'),
    ('train.tags', ('FrozenLake', 'Bandit', 'SimpleSokoban'), r'train\.groups=4.*multiple of.*3'),
    ('train.tags', ('Nowhere',), r"'Nowhere'.*FrozenLake"),
    ('train.tags', ('FrozenLake', 'FrozenLake'), r'named once'),
    ('train.tag_groups', (2, 2), r"train\.tag_groups=\(2, 2\).*for each of train\.tags=\('FrozenLake',\)"),
    ('train.tag_groups', (0,), r'train\.tag_groups=\(0,\).*positive'),
    ('train.tag_groups', (4.0,), r'train\.tag_groups=\(4\.0,\).*positive'),
    ('eval.tag_groups', (7,), r'eval\.tag_groups=\(7,\): must add up to eval\.groups=16, not 7'),
    ('envs.FrozenLake.symbols', 'P_OGX', r"envs\.FrozenLake.*symbols='P_OGX'; allowed: 6 different"),
    ('train.temperature', 0.0, r'train\.temperature=0\.0.*above 0'),
    ('optimizer.grad_clip', 0.0, r'optimizer\.grad_clip=0\.0: must be above 0'),
    ('agent.action_sep', ' ', r"agent\.action_sep=' ': must not be blank"),
    (
      'agent.action_sep',
      ' |',
      r"^agent\.action_sep=' \|': must not begin or end with a blank; one is written before it",
    ),
    ('agent.action_sep', 'T', r"^agent\.action_sep='T': occurs in actions of FrozenLake: Left, Right$"),
    ('train.top_k', 5, r"algorithm\.old_logprobs='sampler'.*'trainer'"),
    ('eval.top_p', 0.0, r'eval\.top_p=0\.0'),
    ('envs.FrozenLake.p', 1.5, r'envs\.FrozenLake.*p=1\.5'),
    ('envs.FrozenLake.type', 'lake', r"envs\.FrozenLake.*'lake'.*frozen_lake"),
    ('envs.FrozenLake.max_turns', 0, r'envs\.FrozenLake\.max_turns=0'),
    ('envs.FrozenLake.max_turns', None, r'envs\.FrozenLake\.max_turns=None: must be a whole number of at least 1'),
    ('envs.FrozenLake.max_actions', True, r'envs\.FrozenLake\.max_actions=True: must be a whole number of at least 1'),
    ('envs.FrozenLake.type', None, r'envs\.FrozenLake\.type=None: must name an environment, such as frozen_lake'),
    ('agent.format_penalty', 0.1, r'agent\.format_penalty=0\.1'),
    ('profile', (100, 101), r'profile=\(100, 101\): begins after the last iteration, num_iterations = '),
    ('logging.trajectories', 17, r'logging\.trajectories=17: must be at most logging\.episodes = 16'),
    ('model.preset', 'gpt', r"model\.preset='gpt'.*tiny"),
    ('model.path', '/does/not/exist', r"model\.path='/does/not/exist' does not exist"),
    ('model.dtype', 'int8', r"model\.dtype='int8'.*bfloat16"),
    ('model.remat', 'some', r"model\.remat='some': allowed: auto, False, elementwise, attention, True"),
    ('model.remat', 1, r'model\.remat=1: allowed: auto'),
    ('model.attention', 'fast', r"model\.attention='fast'.*auto.*splash"),
    ('model.attention', 'flash', r"model\.attention='flash': runs on TPUs"),
    ('model.attention', 'splash', r"model\.attention='splash': runs on TPUs"),
    ('agent.decode_shards', 2, r'agent\.decode_shards=2: must divide the 1 row shards.*allowed are 0, 1'),
    ('agent.max_response_tokens', 10_000, r'^agent\.max_response_tokens=10000: must be below agent\.max_context=\d+,'),
    ('train.top_p', 0.9, r"algorithm\.old_logprobs='sampler'.*'trainer'"),
    ('model.param_dtype', 'float16', r"^model\.param_dtype='float16': allowed: float32, bfloat16$"),
    ('model.param_dtype', 'bfloat16', r"^model\.param_dtype='bfloat16': weights that are trained are kept in 'fl"),
    ('export.dtype', 'int8', r"^export\.dtype='int8': allowed: float32, bfloat16, float16$"),
    ('algorithm.replay_experts', True, r'^algorithm\.replay_experts=True: must be False: tiny has no experts$'),
    ('lora.path', 'adapters', r"^lora\.path='adapters': needs lora\.rank above 0$"),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(field, value, message):
  config = small_config()
  with config.unlocked():
    config.update_from_flattened_dict({field: value})
  assert_refused(check_config, config, message)


@pytest.mark.parametrize(
  ('least', 'fields'),
  [
    (1, ['num_iterations', 'train.groups', 'train.group_size', 'eval.groups', 'eval.group_size', 'checkpoint.keep']),
    (1, ['agent.max_response_tokens', 'agent.max_context', 'algorithm.ppo_epochs', 'length_step']),
    (1, ['optimizer.mini_batch_size', 'agent.decode_chunk']),
    (0, ['optimizer.micro_batch_size', 'agent.rows_in_flight', 'agent.decode_shards']),
    (0, ['seed', 'train.top_k', 'eval.top_k', 'eval.every', 'eval.temperature']),
    (0, ['checkpoint.every', 'model.logits_chunk', 'lora.rank']),
    (-1, ['compile_ahead']),
    (0, ['logging.trajectories', 'logging.episodes', 'logging.episodes_every']),
    (0, [f'algorithm.{x}' for x in ('value_clip', 'value_coef', 'clip_ratio_low', 'clip_ratio_high')]),
    (0, [f'optimizer.{x}' for x in ('actor_lr', 'critic_lr', 'warmup_steps', 'weight_decay', 'critic_warmup')]),
  ],
)
def test_numbers_that_are_too_small(least, fields):
  for field in fields:
    message = rf'^{field}={least - 1}(\.0)?: must be at least {least}$'
    assert_refused(_check, small_config({field: least - 1}), message)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    *(
      ({f'plan.{name}': 0}, rf'^plan\.{name}=0: must be at least 1$')
      for name in ('devices', 'prompt_tokens', 'observation_tokens', 'reply_tokens', 'longest_reply')
    ),
    ({'plan.turns': -1}, r'^plan\.turns=-1: must be at least 0$'),
    (
      {'plan.reply_tokens': 9, 'plan.longest_reply': 8},
      r'^plan\.longest_reply=8: must be at least plan\.reply_tokens=9, the mean$',
    ),
    ({'plan.memory_gb': 0.0}, r'^plan\.memory_gb=0\.0: must be above 0'),
  ],
)
def test_a_plan_of_nothing_is_refused(fields, message):
  check_plan(small_config({'plan.turns': 0, 'plan.reply_tokens': 8, 'plan.longest_reply': 8}))
  assert_refused(check_plan, small_config(fields), message)


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'lora.rank': 4}, 'has rank 8, alpha 16 and targets q_proj,v_proj'),
    ({'lora.rank': 8, 'lora.alpha': 8, 'lora.targets': 'q_proj,v_proj'}, 'has rank 8'),
    ({'lora.rank': 8, 'lora.alpha': 16, 'lora.targets': 'q_proj'}, 'has rank 8'),
  ],
)
def test_adapters_of_another_shape_than_the_configs_are_refused(monkeypatch, fields, words):
  found = LoraConfig(rank=8, alpha=16, targets=('q_proj', 'v_proj'))
  monkeypatch.setattr(checks.adapter_files, 'read_config', lambda path, known: found)
  message = rf"^lora\.path='a': {words}.*; set lora\.rank, lora\.alpha and lora\.targets to these$"
  assert_refused(_check, small_config({'lora.path': 'a'} | fields), message)
  same = {'lora.rank': 8, 'lora.alpha': 16, 'lora.targets': 'q_proj,v_proj'}
  _check(small_config({'lora.path': 'a'} | same))


def test_several_processes_do_not_compile_ahead(monkeypatch):
  monkeypatch.setattr(checks.jax, 'process_count', lambda: 2)
  for threads in (-1, 0):
    checks._check_ranges(small_config(compile_ahead=threads))
  assert_refused(checks._check_ranges, small_config(compile_ahead=1), r'^compile_ahead=1: must be -1 or 0 with 2 proc')


@pytest.mark.parametrize(
  ('bound', 'fields'),
  [
    ('between 0 and 1', [f'algorithm.{x}' for x in ('gamma', 'lam', 'high_level_gamma')]),
    ('between 0 and 1', ['optimizer.final_lr_fraction']),
    ('above 0 and at most 1', ['train.top_p', 'eval.top_p']),
    ('at least 0 and below 1', ['optimizer.b1', 'optimizer.b2']),
  ],
)
def test_shares_and_decay_rates(bound, fields):
  for field in fields:
    for x in (-0.5, 1.5):
      assert_refused(_check, small_config({field: x}), rf'^{field}={x}: must be {bound}$')


@pytest.mark.parametrize(
  ('shards', 'fields', 'message'),
  [
    (8, {}, r'^optimizer\.micro_batch_size=4: must be a multiple of 8 row shards$'),
    (4, {'train.group_size': 2}, None),
    (8, {'optimizer.micro_batch_size': 0}, None),
    (
      16,
      {'optimizer.micro_batch_size': 0},
      r'^optimizer\.mini_batch_size=8: must be a multiple of 16 row shards$',
    ),
    (4, {'agent.rows_in_flight': 6}, r'^agent\.rows_in_flight=6: must be a multiple of 4 row shards, or 0$'),
    (4, {'eval.groups': 18}, r'^eval\.groups \* eval\.group_size = 18: must be a multiple of 4 row shards$'),
  ],
)
def test_rows_divide_over_the_row_shards(monkeypatch, shards, fields, message):
  monkeypatch.setattr(checks, 'row_shards', lambda mesh: shards)
  config = small_config(fields)
  if message is None:
    return _check(config)
  assert_refused(_check, config, message)


@pytest.mark.parametrize('name', ['type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'])
def test_an_environment_without_a_field_that_all_have_is_refused(name):
  config = small_config()
  with config.unlocked():
    del config.envs.FrozenLake[name]
  assert_refused(check_config, config, rf'envs\.FrozenLake\.{name}=None: must ')


def test_a_misspelt_model_is_refused_although_a_path_names_the_weights():
  config = small_config(model__preset='qwen2.5-0.5b-lroa', model__path=presets.resolve('tiny', ''))
  assert_refused(check_config, config, r"model\.preset='qwen2\.5-0\.5b-lroa'.*did you mean 'qwen2\.5-0\.5b'")


def test_fractions_of_words_are_refused():
  config = small_config(train__tags=('Own',))
  config.envs.unlock()
  config.envs.Own = {**config.envs.FrozenLake, 'max_words': 2.5}
  assert_refused(check_config, config, r'envs\.Own\.max_words=2\.5: must be a whole number of at least 1')


def test_a_limit_of_sokoban_that_the_prompt_does_not_tell_is_refused():
  config = small_config(train__tags=('SimpleSokoban',), envs__SimpleSokoban__max_steps=9)
  assert_refused(check_config, config, r'envs\.SimpleSokoban: max_steps=9; allowed: at least max_actions=10')


def test_processes_play_equal_numbers_of_groups(monkeypatch):
  monkeypatch.setattr(checks, 'row_share', lambda mesh: RowShare(shards=3, first=1, own=1))
  assert_refused(check_config, small_config(), r'train\.groups=4: must be a multiple of 3, the number of parts')


def test_grpo_needs_a_group_to_compare_with():
  config = small_config(algorithm__adv_estimator='grpo', train__group_size=1, train__groups=16)
  assert_refused(check_config, config, r'train\.group_size=1.*at least 2')


def test_a_mesh_that_does_not_divide_the_model_is_refused_before_anything_is_read(monkeypatch):
  monkeypatch.setattr(checks, 'make_mesh', lambda **_: jax.sharding.AbstractMesh((1, 1, 4), AXES))
  monkeypatch.setattr(checks, 'row_share', lambda mesh: RowShare())
  monkeypatch.setattr('ragen_jax.models.checkpoint.load.load_params', lambda *a, **k: pytest.fail('weights were read'))
  message = r'mesh\.tensor=4: does not divide the 2 of layers/0/self_attn/k_proj.*smaller sizes that divide it: 1, 2'
  assert_refused(check_config, small_config(mesh__tensor=4), message)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('plan.devices', 0, r'^plan\.devices=0: must be at least 1$'),
    ('plan.memory_gb', 0.0, r'^plan\.memory_gb=0\.0: must be above 0$'),
    ('plan.prompt_tokens', 0, r'^plan\.prompt_tokens=0: must be at least 1$'),
  ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(field, value, message):
  assert_refused(check_plan, small_config({field: value}), message)


def test_tags_of_one_server_share_its_sessions(monkeypatch):
  config = small_config(train__group_size=4, eval__group_size=2)
  with config.unlocked():
    for tag, address in (('A', 'x'), ('B', 'x/'), ('C', 'y')):
      budget = {'max_turns': 1, 'max_actions': 1, 'max_actions_per_turn': 1, 'max_words': 9}
      config.envs[tag] = {'type': 'openenv', 'url': f'http://{address}', 'task': 'Play.'} | budget
  config.train.tags, config.train.tag_groups = ('A', 'B', 'C', 'FrozenLake'), (1, 2, 3, 4)
  config.eval.tags, config.eval.tag_groups = ('B', 'FrozenLake'), (9, 1)
  config.train.groups = config.eval.groups = 10
  told = []
  monkeypatch.setattr(checks, 'check_needs', lambda specs, episodes, envs: told.append(episodes))
  checks._check_needs(config, ('train', 'eval'))
  checks._check_needs(config, ('eval',))
  assert told == [{'A': 12, 'B': 18, 'C': 12, 'FrozenLake': 16}, {'B': 18, 'FrozenLake': 2}]


def test_a_forced_answer_leaves_no_place_for_calls_in_the_form_of_the_template():
  config = small_config(
    {
      'eval.tags': ('Dataset',),
      'envs.Dataset.tools': ('search',),
      'envs.Dataset.tools_format': 'template',
      'envs.Dataset.tool_options.search.retriever': 'mock',
      'envs.Dataset.max_turns': 2,
      'envs.Dataset.max_actions': 2,
      'agent.format': 'no_think',
    }
  )
  message = r"^agent\.force_prefix=True: must be False with agent\.format='no_think' and envs\.Dataset\.tools_format="
  assert_refused(lambda c: checks._check_needs(c, ('eval',)), config, message)
