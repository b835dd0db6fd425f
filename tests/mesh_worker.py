"""Plays and updates once on the mesh that is asked for and writes down what came of it; run by test_mesh.py."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from ragen_jax import experiment, train
from tests import helpers


def main() -> None:
  data, fsdp, tensor, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
  config = helpers.small_config(
    train__groups=8, train__group_size=4, optimizer__mini_batch_size=16, optimizer__micro_batch_size=8,
    agent__drop_finished=True,
  )  # fmt: skip
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = data, fsdp, tensor
  policy = experiment.load_policy(config)
  trainer = train.Trainer(config, policy)
  params, opt_state, _ = trainer.init()
  rollout = trainer.rollout(params, 0)
  batch, metrics = trainer.make_batch(params, rollout)
  params, opt_state, more = trainer.update(params, opt_state, batch, rollout, 0)
  embedding = params['policy']['embed_tokens'][...]
  np.savez(
    out,
    tokens=rollout.trajectory.tokens,
    logprobs=rollout.trajectory.logprobs,
    advantages=batch.advantages,
    metrics=json.dumps(metrics | more),
    shards=len({str(s.index) for s in embedding.addressable_shards}),
    **{f'w{i}': np.asarray(x) for i, x in enumerate(jax.tree.leaves(params))},
  )


if __name__ == '__main__':
  main()
