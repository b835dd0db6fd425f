"""The role of each field of the config, and the lists of fields that follow from the roles.

A field has one role, which describes the effect of the field. `ROLES` is the only definition. Three lists follow from
it: the fields that may change when a run is resumed, the fields that identify the weights of a checkpoint, and the
fields that distinguish runs in a plot.

  weights         the weights of the model; a checkpoint can be read only with the same values
  learning        affects learning in training and in a warm start
  training        affects learning in training (--mode=train); a warm start does not read it
  warm_start      affects learning in a warm start (--mode=sft)
  length          the length of training
  evaluation      the held-out episodes and their sampling
  diagnostics     additional measurements; learning does not depend on them
  memory          division of the work over time; numbers change by rounding only
  devices         division of the work over devices; numbers change by rounding only
  kernels         the choice among equal implementations on a device: numbers change by rounding only
  shapes          the shapes and the order of programs: numbers change by rounding only
  logging         the output of a run, and the end of a run whose numbers are not finite
  prompt_search   affects the prompts that --mode=optimize_prompt finds; no other mode reads it
  other_modes     read by --mode=eval, --mode=export or --mode=plan only, or how a prompt search asks its critic
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flax import traverse_util

# Role -> section -> fields. '' contains the fields outside of sections. The entry '*' of `envs` stands for all of its
# fields, which depend on the classes of environments.
_ALL = ('*',)
ROLES: dict[str, dict[str, tuple[str, ...]]] = {
  'weights': {
    'model': ('preset', 'path', 'separate_critic', 'vision'),
    'lora': ('rank', 'alpha', 'targets', 'path'),
  },
  'learning': {
    '': ('seed',),
    'model': ('dtype', 'param_dtype'),
    'envs': _ALL,
    'agent': (
      'format', 'force_prefix', 'action_sep', 'request', 'max_response_tokens', 'context', 'context_turns',
      'overlong', 'max_context', 'format_penalty',
    ),
    'optimizer': (
      'actor_lr', 'critic_lr', 'critic_warmup', 'warmup_steps', 'final_lr_fraction', 'b1', 'b2', 'weight_decay',
      'grad_clip', 'mini_batch_size',
    ),
  },
  'training': {
    'model': ('weights',),
    'train': (
      'tags', 'groups', 'tag_groups', 'group_size', 'online_k', 'first_level', 'temperature', 'top_p', 'top_k',
    ),
    'algorithm': (
      'adv_estimator', 'mask_loss', 'mask_advantages', 'gamma', 'lam', 'high_level_gamma', 'high_level_lam',
      'critic_lam', 'bootstrap_truncated', 'length_weight', 'step_gamma', 'step_weight', 'step_std',
      'whiten_advantages', 'policy_loss', 'ratio_level', 'clip_ratio_low', 'clip_ratio_high', 'clip_ratio_c',
      'tau_pos', 'tau_neg', 'dro_beta', 'value_clip', 'value_coef', 'entropy_coef', 'kl_loss_coef', 'kl_reward_coef',
      'kl_kind', 'loss_agg_mode', 'loss_norm_length', 'old_logprobs', 'tis_cap', 'replay_experts', 'ppo_epochs',
    ),
    'reward': ('credit', 'grouping', 'method', 'format_reward', 'state_reward', 'state_floor', 'state_place'),
    'filter': (
      'metric', 'strategy', 'value', 'type', 'include_zero', 'top_p_mode', 'loss_scaling', 'soft', 'fixed_steps',
      'max_rollouts',
    ),
    'replay': ('groups', 'max_age'),
    'agent': ('episode_timeout', 'rollout_timeout'),
    'curriculum': ('order', 'iterations', 'window', 'target', 'width', 'explore', 'ema_decay'),
    'serve': (
      'timeout', 'heartbeat', 'max_attempts', 'trained', 'frozen', 'incomplete', 'success_reward', 'success_score',
      'keep_thoughts', 'bad_calls', 'max_staleness', 'image_tokens',
    ),
    'prompt': ('text', 'file'),
    'monitor': (
      'ema_decay', 'echo_trap', 'baseline_steps', 'min_signals', 'patience', 'rollback_lr', 'max_rollbacks',
      'flat_reward_patience', 'hopeless_patience', 'empty_patience',
    ),
  },
  'warm_start': {
    'sft': (
      'data', 'tags', 'levels', 'group_size', 'first_level', 'skip_held_out', 'skip_held_out_of',
      'noise', 'beginner', 'timid', 'hurry',
      'actions_per_turn', 'discount', 'steps', 'batch_size', 'packing', 'val_fraction', 'learning_rate', 'value_coef',
      'from_scratch', 'shape', 'linear_layers', 'forms', 'short_steps', 'tower',
    ),
  },
  'length': {'': ('num_iterations',)},
  'evaluation': {
    'eval': (
      'tags', 'groups', 'tag_groups', 'group_size', 'first_level', 'every', 'temperature', 'top_p', 'top_k',
    ),
  },
  'diagnostics': {
    'eval': ('greedy_too',),
    'monitor': ('information_samples', 'gradient_buckets', 'bucket_mode'),
  },
  'memory': {
    '': ('length_step',),
    'model': ('logits_chunk',),
    'agent': ('drop_finished',),
    'optimizer': ('micro_batch_size',),
  },
  'devices': {'mesh': ('data', 'fsdp', 'tensor')},
  'kernels': {'model': ('attention', 'remat')},
  'shapes': {
    'agent': ('schedule', 'decode_chunk', 'rows_in_flight', 'env_threads', 'decode_shards'),
    'optimizer': ('packing',),
    'serve': ('slots',),
  },
  'logging': {
    '': ('compilation_cache', 'compile_ahead', 'profile'),
    'checkpoint': ('every', 'keep'),
    'serve': (
      'host', 'port', 'model', 'max_queue', 'max_connections', 'max_body', 'max_images', 'grace', 'keep',
      'max_concurrency',
    ),
    'logging': ('episodes', 'episodes_every', 'trajectories', 'tracker', 'project'),
    'monitor': ('information_every', 'gradients_every', 'max_bad_iterations', 'spike_factor'),
    'sft': ('output', 'save_data', 'eval_every', 'checkpoint_every'),
  },
  'prompt_search': {
    'prompt': (
      'rounds', 'beam', 'branches', 'tasks', 'attempts', 'held_out', 'final', 'failed_score', 'max_chars',
      'shown_chars', 'critic_model', 'critic_temperature', 'critic_max_tokens',
    ),
  },
  'other_modes': {
    'prompt': ('critic', 'critic_key', 'critic_timeout', 'critic_workers', 'critic_tries'),
    'eval': (
      'step', 'baselines', 'endpoint', 'endpoint_model', 'endpoint_timeout', 'endpoint_workers', 'endpoint_tries',
      'endpoint_max_tokens',
    ),
    'export': ('output', 'step', 'lora', 'dtype', 'push', 'push_episodes', 'private'),
    'plan': (
      'topology', 'devices', 'memory_gb', 'prompt_tokens', 'observation_tokens', 'reply_tokens', 'longest_reply',
      'turns',
    ),
  },
}  # fmt: skip

# Field of earlier versions -> what it is now, in words for an error.
REPLACED = {'agent.think': "it is agent.format now, 'free_think' for True and 'no_think' for False"}

# Field, or pattern of fields -> the value by which versions without this field acted.
BEFORE = {
  'envs.*.max_response_tokens': 0, 'envs.*.max_observation_tokens': 0, 'envs.*.request': '',
  'model.weights': 'float', 'model.vision': 'frozen', 'envs.*.tile': 0, 'envs.*.observation': 'text',
  'reward.format_reward': 0.0, 'reward.state_reward': 0.0, 'reward.state_floor': 0.5, 'reward.state_place': 'turn',
  'envs.*.fields.difficulty': '', 'curriculum.order': '', 'curriculum.iterations': 0, 'curriculum.window': 0.25,
  'curriculum.target': 0.5, 'curriculum.width': 0.5, 'curriculum.explore': 0.25, 'curriculum.ema_decay': 0.5,
  'algorithm.policy_loss': 'ppo', 'algorithm.tau_pos': 1.0, 'algorithm.tau_neg': 1.05, 'algorithm.dro_beta': 0.05,
  'algorithm.replay_experts': False, 'algorithm.critic_lam': -1.0, 'serve.image_tokens': 1280,
  'agent.episode_timeout': 0.0, 'agent.rollout_timeout': 0.0,
  'envs.*.simulator.tasks': '', 'envs.*.simulator.executable': '', 'envs.*.simulator.platform': '',
  'envs.*.simulator.render': 'gpu', 'envs.*.simulator.size': 252, 'envs.*.simulator.python': '',
  'envs.*.weights.dino': 0.0, 'envs.*.dino_path': '', 'sft.linear_layers': 0,
  'envs.*.simulator.processes': 2, 'envs.*.simulator.memory_mib': 0, 'envs.*.simulator.step_timeout_s': 300.0,
  'agent.request': 'Answer as {form} and nothing else, in at most {max_words} words.',
}  # fmt: skip

# Roles of fields that do not change a run's curves.
_WITHOUT_EFFECT = {
  'logging', 'other_modes', 'prompt_search', 'warm_start', 'devices', 'kernels', 'shapes', 'memory', 'diagnostics',
}  # fmt: skip
# Sections that training does not read.
_NOT_READ_BY_TRAINING = ('sft', 'export', 'plan')
_EVAL_OF_PROMPT_SEARCH = ('tags', 'first_level', 'temperature', 'top_p', 'top_k')


def names() -> Iterator[tuple[str, str]]:
  """(dotted name, role) of every entry of `ROLES`; 'envs.*' is the entry of the section `envs`."""
  for role, sections in ROLES.items():
    for section, fields in sections.items():
      for field in fields:
        yield f'{section}.{field}'.lstrip('.'), role


def sections() -> list[str]:
  """The names of the sections of a config, sorted."""
  return sorted({section for of_role in ROLES.values() for section in of_role if section})


_ROLE_OF = dict(names())


def role_of(field: str) -> str | None:
  """The role of a field by its dotted name; None for a field that does not exist in this version."""
  return _ROLE_OF.get(field, _ROLE_OF.get(f'{field.partition(".")[0]}.*'))


def fields_of(*roles: str) -> frozenset[str]:
  """The dotted names of the fields with one of `roles`. Raises KeyError if there is no such role."""
  wanted = {role for role in roles if ROLES[role]}
  return frozenset(name for name, role in _ROLE_OF.items() if role in wanted)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
  """A nested config as {'train.groups': 64, ...}; an empty section remains {}. Raises ValueError if it is no dict."""
  if not isinstance(config, dict):
    raise ValueError(f'expected a dict, got {type(config).__name__}')
  flat = traverse_util.flatten_dict(config, keep_empty_nodes=True, sep='.')
  return {name: {} if value is traverse_util.empty_node else value for name, value in flat.items()}


def in_this_version(recorded: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
  """A flat config that an earlier version recorded, with those of `fields` that it lacks as that version acted."""
  own = dict(recorded)
  if 'agent.think' in own:
    own['agent.format'] = 'free_think' if own.pop('agent.think') else 'no_think'
  added = {f: value for name, value in BEFORE.items() for f in fnmatch.filter(fields, name)}
  return {name: value for name, value in added.items() if name not in own} | own


def select(config: Mapping[str, Any], *roles: str) -> tuple[Any, ...]:
  """The values of the fields with one of `roles`, in the order of their names."""
  return tuple(value for name, value in sorted(flatten(config).items()) if role_of(name) in roles)


# -- Lists of fields ---------------------------------------------------------------------------------------------------


def free_in_training(config: Mapping[str, Any]) -> tuple[frozenset[str], dict[str, str]]:
  """The fields that may change when training is resumed, because earlier iterations do not depend on them.

  `num_iterations` is one of them only if the learning rate and the curriculum do not depend on it. Returns dotted
  names, and dotted name -> reason for a field that may not change because of another field.
  """
  free = fields_of('logging', 'other_modes', 'prompt_search', 'devices', 'kernels', 'shapes', 'warm_start')
  fraction, curriculum = config['optimizer']['final_lr_fraction'], config['curriculum']
  if fraction != 1:
    return free, {'num_iterations': f'the learning rate falls over them, as optimizer.final_lr_fraction={fraction}'}
  if curriculum['order'] in ('sliding', 'growing') and not curriculum['iterations']:
    return free, {'num_iterations': 'the curriculum moves over them, as curriculum.iterations=0'}
  return free | fields_of('length'), {}


def free_in_warm_start() -> frozenset[str]:
  """The fields that may change when a warm start is resumed; fields of `eval` may not change."""
  free = fields_of('training', 'length', 'diagnostics', 'logging', 'other_modes', 'prompt_search', 'kernels', 'shapes')
  return frozenset(name for name in free if not name.startswith('eval.'))


def read_by_prompt_search(config: Mapping[str, Any]) -> dict[str, Any]:
  """Dotted name -> value of the fields that the result of a prompt search depends on, but for the first prompt."""
  named = ('train.tags', 'train.first_level', *(f'eval.{name}' for name in _EVAL_OF_PROMPT_SEARCH))
  return {
    name: value
    for name, value in flatten(read_by_training(config)).items()
    if name in named
    or (role_of(name) in ('weights', 'learning', 'prompt_search') and not name.startswith('optimizer.'))
    or (role_of(name) == 'training' and name.startswith('serve.'))
  }


def free_in_export(config: Mapping[str, Any]) -> frozenset[str]:
  """The fields that may differ from the run's config when its checkpoint is exported."""
  return free_in_training(config)[0] | fields_of('length', 'evaluation', 'diagnostics')


def has_effect(field: str) -> bool:
  """Whether a field can affect the curves of a run. Runs that differ only in other fields are the same.

  A field of another version has an effect, unless no field of its section has one.
  """
  section = f'{field.partition(".")[0]}.'
  role = role_of(field)
  roles = {role} if role else {r for name, r in _ROLE_OF.items() if name.startswith(section)}
  return not (roles and roles <= _WITHOUT_EFFECT)


def read_by_training(config: Mapping[str, Any]) -> dict[str, Any]:
  """The nested config without sections of other modes and without environments that the run does not play."""
  kept = {name: value for name, value in config.items() if name not in _NOT_READ_BY_TRAINING}
  tags = {*config['train']['tags'], *config['eval']['tags']}
  return kept | {'envs': {tag: options for tag, options in config['envs'].items() if tag in tags}}
