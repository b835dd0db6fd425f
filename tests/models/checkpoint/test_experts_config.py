"""Checkpoints with mixtures of experts: configs of the hub, both forms of their weights, and what is refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from ragen_jax import build
from ragen_jax.distributed.mesh import AXES
from ragen_jax.distributed.sharding import weight_spec
from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_params
from ragen_jax.models.checkpoint.names import stored
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.utils.errors import UserError
from tests.models.checkpoint.test_linear_config import hub_config
from tests.support.checkpoints import EXPERTS, HYBRID_EXPERTS, assert_identical, edit_config, random_params
from tests.support.configs import small_config
from tests.support.processes import copy_python

# As published.
_QWEN3_30B = {
  'architectures': ['Qwen3MoeForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'bos_token_id': 151643,
  'decoder_sparse_step': 1, 'eos_token_id': 151645, 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 2048,
  'initializer_range': 0.02, 'intermediate_size': 6144, 'max_position_embeddings': 40960, 'max_window_layers': 48,
  'mlp_only_layers': [], 'model_type': 'qwen3_moe', 'moe_intermediate_size': 768, 'norm_topk_prob': True,
  'num_attention_heads': 32, 'num_experts': 128, 'num_experts_per_tok': 8, 'num_hidden_layers': 48,
  'num_key_value_heads': 4, 'output_router_logits': False, 'rms_norm_eps': 1e-06, 'rope_scaling': None,
  'rope_theta': 1000000.0, 'router_aux_loss_coef': 0.001, 'sliding_window': None, 'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16', 'use_cache': True, 'use_sliding_window': False, 'vocab_size': 151936,
}  # fmt: skip


def test_published_configs_are_those_of_the_presets(tmp_path):
  hybrid = hub_config(
    tied=False, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
    linear_num_value_heads=32, model_type='qwen3_5_moe_text', num_experts=256, num_experts_per_tok=8,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001,
    output_router_logits=False,
  )  # fmt: skip
  hybrid |= {'architectures': ['Qwen3_5MoeForConditionalGeneration'], 'model_type': 'qwen3_5_moe'}
  for name, raw in (('qwen3-30b-a3b', _QWEN3_30B), ('qwen3.5-35b-a3b', hybrid)):
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    assert read_config(str(tmp_path)) == presets.shape(name, '')


@pytest.fixture
def saved(tmp_path):
  directory = tmp_path / 'experts'
  save_model(str(directory), random_params(EXPERTS), EXPERTS, 'float32')
  return directory


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'num_experts': 0}, 'num_experts=0 must be a positive integer'),
    ({'num_experts_per_tok': 7}, 'num_experts_per_tok=7 must be at most num_experts=6'),
    ({'moe_intermediate_size': None}, 'moe_intermediate_size=None must be a positive integer'),
    ({'norm_topk_prob': 'yes'}, "norm_topk_prob='yes' is not supported; only true and false are"),
    ({'mlp_only_layers': [0, 1]}, 'mlp_only_layers=[0, 1] and decoder_sparse_step=1 leave none of the 2 layers'),
    ({'decoder_sparse_step': 3}, 'decoder_sparse_step=3 leave none of the 2 layers experts'),
    ({'decoder_sparse_step': 0}, 'decoder_sparse_step=0 must be a positive integer'),
    ({'mlp_only_layers': [2]}, 'mlp_only_layers=[2] must be a list of layers from 0 to 1'),
    ({'mlp_only_layers': 1}, 'mlp_only_layers=1 must be a list of layers'),
    ({'shared_expert_intermediate_size': 8}, 'shared_expert_intermediate_size=8 is not supported'),
    ({'num_shared_experts': 1}, 'num_shared_experts=1 is not supported; fields of experts that are: num_experts,'),
    ({'router_scaling': 2.5}, 'router_scaling=2.5 is not supported'),
    ({'scoring_func': 'sigmoid'}, "scoring_func='sigmoid' is not supported"),
    ({'n_group': 4}, 'n_group=4 is not supported'),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
  ],
)
def test_configs_that_cannot_be_followed_are_one_line(saved, changes, words):
  edit_config(saved, **changes)
  with pytest.raises(UserError) as e:
    read_config(str(saved))
  assert words in str(e.value) and '\n' not in str(e.value)


def test_weights_of_experts_of_qwen3_5_are_normalised_in_any_case(tmp_path):
  save_model(str(tmp_path / 'm'), random_params(HYBRID_EXPERTS), HYBRID_EXPERTS, 'float32')
  raw = json.loads((tmp_path / 'm' / 'config.json').read_text())
  assert 'norm_topk_prob' not in raw and read_config(str(tmp_path / 'm')) == HYBRID_EXPERTS
  edit_config(tmp_path / 'm', norm_topk_prob=False)
  with pytest.raises(UserError, match='norm_topk_prob=False is not supported; only true is'):
    read_config(str(tmp_path / 'm'))
  for field, value in (('decoder_sparse_step', 2), ('mlp_only_layers', [0])):
    save_model(str(tmp_path / field), random_params(HYBRID_EXPERTS), HYBRID_EXPERTS, 'float32')
    edit_config(tmp_path / field, **{field: value})
    with pytest.raises(UserError, match=rf'{field}=.* is not supported; all layers of Qwen3.5 have experts'):
      read_config(str(tmp_path / field))


def test_what_a_file_leaves_out_is_what_transformers_takes(saved, transformers):
  edit_config(saved, remove=('norm_topk_prob', 'decoder_sparse_step', 'mlp_only_layers', 'head_dim'))
  cfg, theirs = read_config(str(saved)), transformers.AutoConfig.from_pretrained(str(saved))
  assert cfg.experts.normalised is theirs.norm_topk_prob is False
  assert cfg.mlp_layers == () and theirs.mlp_only_layers == [] and theirs.decoder_sparse_step == 1
  # Unlike Qwen3's without experts.
  model = transformers.AutoModelForCausalLM.from_config(theirs)
  assert cfg.head_dim == model.model.layers[0].self_attn.head_dim == 4


def test_layers_without_experts_are_every_other_one_and_those_that_are_listed(saved):
  edit_config(saved, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
  assert read_config(str(saved)).mlp_layers == (0, 2, 3, 4)


def _together(directory) -> None:
  """The same checkpoint with the experts of a layer in two tensors."""
  file = directory / 'model.safetensors'
  tensors = load_file(file)
  for name, tensor in stored(read_config(str(directory))).items():
    if tensor.parts[0][1]:
      whole = np.zeros(tensor.shape, np.float32)
      for w, place in tensor.parts:
        whole[place] = tensors.pop(w.name)
      tensors[name] = whole
  save_file(tensors, file)


@pytest.mark.parametrize('cfg', [EXPERTS, HYBRID_EXPERTS], ids=['qwen3_moe', 'qwen3_5_moe'])
def test_both_forms_of_weights_are_the_same_model(tmp_path, cfg):
  params = random_params(cfg)
  save_model(str(tmp_path), params, cfg, 'float32')
  each = set(load_file(tmp_path / 'model.safetensors'))
  _together(tmp_path)
  together = set(load_file(tmp_path / 'model.safetensors'))
  assert 'model.layers.0.mlp.experts.gate_up_proj' in together and 'model.layers.0.mlp.experts.0.up_proj.weight' in each
  assert_identical(load_params(str(tmp_path), cfg, jnp.float32), params)


def test_the_form_that_transformers_writes_comes_back(saved, tmp_path, transformers):
  """Both sides read what the other wrote, to the last bit."""
  theirs = transformers.AutoModelForCausalLM.from_pretrained(str(saved))
  theirs.save_pretrained(str(tmp_path / 'theirs'))
  assert read_config(str(tmp_path / 'theirs')) == EXPERTS
  assert_identical(load_params(str(tmp_path / 'theirs'), EXPERTS, jnp.float32), random_params(EXPERTS))


def test_tensors_that_do_not_fit_are_one_line(saved):
  file = saved / 'model.safetensors'
  tensors = load_file(file)
  name = 'model.layers.0.mlp.experts.{}.down_proj.weight'

  def problem(changed):
    save_file(changed, file)
    with pytest.raises(UserError) as e:
      load_params(str(saved), EXPERTS, jnp.float32)
    assert '\n' not in str(e.value)
    return str(e.value)

  without = {k: x for k, x in tensors.items() if k != name.format(4)}
  assert f'1 missing: {name.format(4)}' in problem(without)
  more = tensors | {name.format(6): tensors[name.format(5)]}
  assert f'1 unexpected: {name.format(6)}' in problem(more)
  whole = np.stack([tensors[name.format(e)] for e in range(6)])
  both = tensors | {'model.layers.0.mlp.experts.down_proj': whole}
  assert 'of experts that other tensors have too: model.layers.0.mlp.experts.down_proj' in problem(both)
  others = {k: x for k, x in tensors.items() if 'experts' not in k or 'down_proj' not in k}
  assert 'down_proj [5, 16, 12] instead of [6, 16, 12]' in problem(
    others | {'model.layers.0.mlp.experts.down_proj': whole[:5]}
  )


_DIVIDED = """
import sys
import jax
from ragen_jax.agent.language_model import weight_shardings
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint.load import load_params
from tests.support.checkpoints import EXPERTS, assert_identical, random_params

shardings = weight_shardings(EXPERTS, make_mesh(2, 2, 2), frozen=len(sys.argv) > 2)
params = load_params(sys.argv[1], EXPERTS, 'float32', shardings.__getitem__)
kernel = params['layers'][0]['mlp']['experts']['up_proj']['kernel'].get_value()
assert kernel.sharding.shard_shape(kernel.shape)[0] < 6 and kernel.sharding == shardings[
  ('layers', 0, 'mlp', 'experts', 'up_proj', 'kernel')]
assert_identical(params, random_params(EXPERTS))
"""


@pytest.mark.slow
def test_experts_go_to_their_devices(saved):
  _together(saved)
  done = copy_python(_DIVIDED, str(saved), 'frozen', devices=8)
  assert done.returncode == 0, done.stderr[-3000:]


def test_a_mesh_that_does_not_divide_the_experts_is_one_line():
  mesh = AbstractMesh((1, 1, 4), AXES)
  with pytest.raises(UserError, match=r'^mesh\.tensor=4: does not divide the 6 of .*experts/gate_proj/kernel') as e:
    weight_spec('layers/0/mlp/experts/gate_proj/kernel', (6, 16, 12), mesh)
  assert '\n' not in str(e.value)


def test_experts_have_no_adapters_and_that_is_one_line(tmp_path):
  attention = ('q_proj', 'k_proj', 'v_proj', 'o_proj')
  assert lora.targets(presets.shape('qwen3-30b-a3b', '')) == attention
  assert lora.targets(EXPERTS) == attention  # though one of its layers has an MLP
  assert {'up_proj', 'shared_expert_gate', 'in_proj_z'} < {*lora.targets(HYBRID_EXPERTS)}
  config = small_config(model__preset='qwen3-30b-a3b', lora__rank=2)
  assert build.lora_config(config).targets == attention
  config.lora.targets = 'q_proj,up_proj'
  with pytest.raises(UserError, match=r"^lora\.targets='q_proj,up_proj': allowed: all-linear, or some of q_proj,") as e:
    build.lora_config(config)
  assert '\n' not in str(e.value)
