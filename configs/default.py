"""Every field once, with what it means. The other files of this folder change some of them.

  python main.py --config=configs/frozenlake_ppo.py --config.algorithm.clip_ratio_high=0.3

sets a field by its name. A word behind the file's name, `configs/frozenlake_ppo.py:qwen2.5-0.5b`, chooses the model and
the settings that go with its size (`ragen_jax/models/presets.py` lists them).
"""

from ml_collections import ConfigDict

from ragen_jax.envs import bandit


def get_config(model: str = '') -> ConfigDict:
  """The defaults: the built-in model, or those of a real one.

  Args:
    model: a name from `ragen_jax.models.presets`; empty means 'tiny', the model in this repository.
  """
  config = ConfigDict()

  # Seeds the draws of tokens, the order of minibatches and fresh weights. Runs that differ only in it train on
  # different levels too; the held-out levels stay the same. 0 to 428.
  config.seed = 0
  # Optimiser iterations: one rollout and one pass of updates each.
  config.num_iterations = 100

  config.model = ConfigDict()
  # Which model: 'tiny' or a name from ragen_jax/models/presets.py. The word behind the config file's name sets it.
  config.model.preset = model or 'tiny'
  # Directory of a Hugging Face checkpoint that is used in place of the preset's weights; empty for the preset's own.
  config.model.path = ''
  # Type that computations run in: 'float32' or 'bfloat16'; 'auto' is float32 on CPU and bfloat16 elsewhere.
  config.model.dtype = 'auto'
  # Recompute each layer's activations in the backward pass: less memory, about a third more work.
  config.model.remat = False
  # Token positions whose vocabulary log-probs are held at once in the update; 0 holds all of a micro-batch's.
  config.model.logits_chunk = 0

  # -- Environments, by RAGEN's tags; `train.tags` and `eval.tags` choose among them. ---------------------------------
  # In each: `type` is the class (ragen_jax/envs), `max_turns` replies an episode, `max_actions` actions an episode,
  # `max_actions_per_turn` actions of one reply that are carried out, `max_words` the length that the prompt asks for.
  # The other fields are the options of the class.
  config.envs = ConfigDict()
  config.envs.FrozenLake = ConfigDict(
    {
      'type': 'frozen_lake',
      # Rows and columns.
      'size': 4,
      # Probability that a square is ice.
      'p': 0.8,
      # Whether a move can slide off sideways.
      'is_slippery': True,
      # On slippery ice, the probability of moving as meant; the two right angles share the rest.
      'success_rate': 1 / 3,
      # How the state is told: 'grid', 'coord' or 'grid_coord'.
      'observation': 'grid',
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  config.envs.SimpleSokoban = ConfigDict(
    {
      'type': 'sokoban',
      # Rows and columns, the outer walls included.
      'dim': (6, 6),
      # Boxes, and targets.
      'num_boxes': 1,
      # How far the reverse play that makes a level may go.
      'search_depth': 300,
      # How the state is told: 'grid', 'coord' or 'grid_coord'.
      'observation': 'grid',
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  config.envs.Bandit = ConfigDict(
    {
      'type': 'bandit',
      # Pairs of (safe arm, risky arm); a level shows one of them.
      'arms': bandit.PHOENIX_DRAGON,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )

  # -- Training rollouts. ---------------------------------------------------------------------------------------------
  config.train = ConfigDict()
  # Environments that are trained on.
  config.train.tags = ('FrozenLake',)
  # Prompt groups of an iteration, divided equally among the tags; each is one level.
  config.train.groups = 64
  # Episodes a group: they share the level, and each has its own luck and its own tokens.
  config.train.group_size = 8
  # Seed of the first training level. Group g of iteration i has seed + i * groups + g, and each `config.seed` its own
  # range of 10 million.
  config.train.first_level = 10_000
  # Divides the logits when tokens are drawn, and in the loss.
  config.train.temperature = 1.0
  # Draw from the smallest set of tokens that has this much probability; 1 draws from all, as the loss assumes, and less
  # needs algorithm.old_logprobs='trainer'.
  config.train.top_p = 1.0
  # Draw from this many likeliest tokens; 0 draws from all, as the loss assumes.
  config.train.top_k = 0

  # -- Evaluation: the same held-out levels every time. ---------------------------------------------------------------
  config.eval = ConfigDict()
  # Environments that are evaluated on.
  config.eval.tags = ('FrozenLake',)
  # Held-out levels, divided equally among the tags.
  config.eval.groups = 256
  # Episodes a level, each with its own luck.
  config.eval.group_size = 4
  # Seed of the first held-out level; their seeds must not overlap with those of training.
  config.eval.first_level = 123
  # Evaluate before training, after every so many iterations and after the last. 0 evaluates at the ends only.
  config.eval.every = 10
  # Divides the logits when tokens are drawn; 0 takes the likeliest.
  config.eval.temperature = 0.5
  # As in training.
  config.eval.top_p = 1.0
  # As in training.
  config.eval.top_k = 0
  # Evaluate a second time with the likeliest token everywhere.
  config.eval.greedy_too = True

  # -- How an episode goes. -------------------------------------------------------------------------------------------
  config.agent = ConfigDict()
  # Replies think before they answer: <think>...</think><answer>...</answer>; without, <answer>...</answer>.
  config.agent.think = True
  # The reply's first tag is put there for the policy; otherwise the policy has to write it.
  config.agent.force_prefix = True
  # What separates the actions of one reply.
  config.agent.action_sep = '||'
  # Tokens of one reply at most.
  config.agent.max_response_tokens = 32
  # Tokens of a whole episode at most; one that would not fit another turn ends there.
  config.agent.max_context = 512
  # Added to the reward of a turn whose reply has the wrong form or names an unknown action; 0 or negative.
  config.agent.format_penalty = -0.1
  # Episodes that are over leave the batch once half of those of every device are.
  config.agent.drop_finished = True

  # -- The update. ----------------------------------------------------------------------------------------------------
  config.algorithm = ConfigDict()
  # How advantages are estimated: 'gae' (PPO), 'turn_wise_gae', 'bi_level_gae', 'grpo', 'dr_grpo', 'rloo', 'brpo',
  # 'arpo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline' or 'gigpo'; see ragen_jax/algorithms/advantages.py.
  config.algorithm.adv_estimator = 'gae'
  # Discount for each sampled token.
  config.algorithm.gamma = 1.0
  # Decay of GAE for each sampled token.
  config.algorithm.lam = 1.0
  # Discount for each turn, in 'bi_level_gae' and 'turn_wise_gae'.
  config.algorithm.high_level_gamma = 0.95
  # Whiten the advantages over the batch, for estimators that do so (the GAE and REINFORCE++ families).
  config.algorithm.whiten_advantages = True
  # How far below 1 the probability ratio may fall before its gradient is cut.
  config.algorithm.clip_ratio_low = 0.2
  # How far above 1 it may rise ("clip-higher").
  config.algorithm.clip_ratio_high = 0.28
  # Bound of the dual clip for negative advantages, above 1; 0 is off.
  config.algorithm.clip_ratio_c = 3.0
  # How far a value may move from the one at sampling before its gradient is cut; 0 is off.
  config.algorithm.value_clip = 0.5
  # Weight of the value loss, whose gradient reaches the shared trunk too; unused without a critic-based estimator.
  config.algorithm.value_coef = 0.1
  # Weight of the entropy bonus.
  config.algorithm.entropy_coef = 0.001
  # How token losses become one number: 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum' or
  # 'seq-mean-token-sum-norm' (over the most tokens that an episode can sample).
  config.algorithm.loss_agg_mode = 'token-mean'
  # Log-probs and values that the update starts from: 'sampler' as recorded when the tokens were drawn, 'trainer'
  # computed again by the update's own forward pass.
  config.algorithm.old_logprobs = 'sampler'
  # Passes over the rollout in an iteration.
  config.algorithm.ppo_epochs = 1

  config.optimizer = ConfigDict()
  # Learning rate of the model.
  config.optimizer.actor_lr = 1e-3
  # Learning rate of the value head.
  config.optimizer.critic_lr = 1e-3
  # Steps over which both rise from 0.
  config.optimizer.warmup_steps = 0
  # Share of the learning rate that is left at the last iteration, reached in a straight line; 1 keeps it constant.
  config.optimizer.final_lr_fraction = 1.0
  # AdamW's decay rates and weight decay.
  config.optimizer.b1 = 0.9
  # As above.
  config.optimizer.b2 = 0.999
  # As above; vectors (norms, biases) are not decayed.
  config.optimizer.weight_decay = 0.01
  # The gradient's greatest global norm.
  config.optimizer.grad_clip = 1.0
  # Episodes of one optimiser step.
  config.optimizer.mini_batch_size = 128
  # Episodes that go through the model at once; gradients add up to those of the whole mini-batch.
  config.optimizer.micro_batch_size = 64

  # -- Supervised warm start (--mode=sft): imitation of the environments' exact solvers. ------------------------------
  config.sft = ConfigDict()
  # Where the trained checkpoint is written, in Hugging Face format.
  config.sft.output = 'runs/sft/checkpoint'
  # Environments that are demonstrated.
  config.sft.tags = ('FrozenLake',)
  # Levels of each, in the order of the tags.
  config.sft.levels = (4096,)
  # Demonstrations a level.
  config.sft.group_size = 1
  # Seed of the first level; their seeds must not overlap with those of evaluation.
  config.sft.first_level = 1_000_000_000
  # Probability that a turn of a demonstration plays random actions, as many as the expert would.
  config.sft.noise = 0.0
  # Probability that a turn follows the plan of a beginner, who for instance does not know that ice is slippery.
  config.sft.beginner = 0.0
  # Probability that of a turn's actions only the first is played.
  config.sft.timid = 0.0
  # Probability that the expert plans a turn as if it were the last, with more actions at once than it would need to.
  config.sft.hurry = 0.5
  # Actions that the expert takes in one turn at most; 0 is as many as the environment lets it.
  config.sft.actions_per_turn = 0
  # What a success is worth to the expert after each further action; below 1 it does not wander.
  config.sft.discount = 0.97
  # Optimiser steps.
  config.sft.steps = 1000
  # Demonstrations a step.
  config.sft.batch_size = 64
  # Peak learning rate; it rises over the first twentieth of the steps and falls to a tenth in a cosine.
  config.sft.learning_rate = 1e-4
  # Weight of the value head's loss: half the squared error of what the best play would still bring, over the mean
  # square of that in the environment. 0 leaves the head as it is.
  config.sft.value_coef = 0.0
  # Begin with fresh weights and a tokenizer made from the prompts of `tags`, instead of with `model`.
  config.sft.from_scratch = False
  # Shape of the fresh model: width, layers, query heads, key/value heads, width of a head, width of the MLP.
  config.sft.shape = (64, 2, 4, 2, 16, 192)

  # -- Devices. Rows are divided over data * fsdp, weights over fsdp and tensor. ---------------------------------------
  config.mesh = ConfigDict()
  # Copies of the weights, each with rows of its own; -1 for as many as there are devices left for.
  config.mesh.data = -1
  # Ways in which the weights and the optimiser's state are divided, also with rows of their own.
  config.mesh.fsdp = 1
  # Ways in which heads, MLP and vocabulary are divided.
  config.mesh.tensor = 1

  config.checkpoint = ConfigDict()
  # Save after every so many iterations; after the last one always. 0 saves at the end only.
  config.checkpoint.every = 10
  # How many of the newest are kept, besides the best by held-out success among those saved right after an evaluation.
  config.checkpoint.keep = 2

  config.logging = ConfigDict()
  # Episodes of each environment that an evaluation writes to TensorBoard as text.
  config.logging.trajectories = 4

  # Column counts (timelines, caches) are rounded up to multiples of this, so that few programs are compiled.
  config.length_step = 64
  # Directory of compiled programs that later runs start faster with; empty for none, 'auto' for <workdir>/xla_cache.
  config.compilation_cache = 'auto'

  if config.model.preset != 'tiny':
    _real_model(config)
  return config


def _real_model(config: ConfigDict) -> None:
  """What changes for a pretrained model: the paper's batch, lengths and learning rates."""
  config.num_iterations = 200
  config.model.remat = True
  config.model.logits_chunk = 2048
  config.train.groups = 8
  config.train.group_size = 16
  config.agent.max_response_tokens = 400
  config.agent.max_context = 3600
  config.optimizer.actor_lr = 1e-6
  config.optimizer.critic_lr = 1e-5
  config.optimizer.mini_batch_size = 32
  config.optimizer.micro_batch_size = 4
  config.length_step = 128
