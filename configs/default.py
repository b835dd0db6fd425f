"""Every field once, with its meaning and default. The other files of this folder change some of them.

  python main.py --config=configs/frozenlake_ppo.py --config.algorithm.clip_ratio_high=0.3

sets a field by its name. A suffix of the file's name, `configs/frozenlake_ppo.py:qwen2.5-0.5b`, selects the model and
the settings for its size (`ragen_jax/models/presets.py` lists the models). The environments are in environments.py.
"""

from ml_collections import ConfigDict, FieldReference

from configs import environments
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = '') -> ConfigDict:
  """The defaults for the built-in model, or for a pretrained one.

  Args:
    model: a name from `ragen_jax.models.presets`; empty means 'tiny', the built-in model. With the suffix '-lora',
      adapters are trained instead of all weights.
  """
  model, adapters = model.removesuffix('-lora'), model.endswith('-lora')
  config = ConfigDict()

  # Seed of token sampling, of the order of mini-batches and of fresh weights, 0 to 428. Each seed trains on levels of
  # its own; the held-out levels are the same for all.
  config.seed = 0
  # Iterations; each updates the policy. Every `train.online_k`-th iteration plays a new rollout.
  config.num_iterations = 100

  config.model = ConfigDict()
  # Model: 'tiny', 'tiny-hybrid' (linear attention in half of its layers), 'tiny-vl' (reads images) or a name from
  # ragen_jax/models/presets.py. The suffix of the config file's name sets it.
  config.model.preset = model or 'tiny'
  # Directory of a Hugging Face checkpoint to use in place of the preset's weights; empty for the preset's weights.
  config.model.path = ''
  # Dtype of computations: 'float32' or 'bfloat16'; 'auto' is float32 on CPU and bfloat16 elsewhere.
  config.model.dtype = 'auto'
  # Attention of whole rows, in the update and the warm start: 'flash' or 'splash' (kernels for TPUs, ours and JAX's),
  # 'cudnn' (for NVIDIA GPUs, in bfloat16), 'blocks' (row by row in blocks of columns; for CPUs) or 'einsum' (all
  # scores in memory; runs everywhere). 'auto' takes the fastest that the devices have.
  config.model.attention = 'auto'
  # Dtype of the frozen weights with LoRA, and of vision towers: 'float32' or 'bfloat16'. Other trained weights are
  # float32.
  config.model.param_dtype = 'float32'
  # Matrices of the decoder's layers: 'float' (in the types above), or 'int8' (8 bits, with a scale for each output):
  # with LoRA the frozen ones, which the sampler and the update read; without LoRA the sampler's copy, made after each
  # update, which needs algorithm.old_logprobs='trainer'. See docs/models.md for what this costs.
  config.model.weights = 'float'
  # What the backward pass computes again to save memory: False (nothing), 'elementwise' (all but products with weights
  # and attention), 'attention' (all but attention), True (whole layers, which needs the least memory) or 'auto' (for
  # each shape of batches the fastest that fits: of models less than 1,536 wide 'attention', of others 'elementwise'; on
  # one CPU 'elementwise', then 'attention'; if that does not fit, whole layers).
  config.model.remat = FieldReference(False, field_type=object)
  # Whether the critic is a second model that starts from the same weights (RAGEN's choice), or a value head on the
  # policy's trunk. A second model needs the memory of another policy and its optimiser state, and a forward pass over
  # each rollout.
  config.model.separate_critic = False
  # Vision tower of a model that reads images: 'frozen' (each distinct image is embedded once, and the update reads the
  # features) or 'trained' (the update runs the tower, and its gradient reaches the tower's weights).
  config.model.vision = 'frozen'
  # Token positions whose log-probs over the vocabulary are computed at once in the update, on one CPU at most 256; 0: a
  # whole micro-batch.
  config.model.logits_chunk = 0

  # -- LoRA: low-rank adapters are trained, the policy's own weights are frozen. ---------------------------------------
  config.lora = ConfigDict()
  # Rank of the adapters; 0 trains all weights. A variant that ends in '-lora' sets RAGEN's rank, 64. All weights of a
  # separate critic are trained; set optimizer.critic_lr to a tenth of the variant's value then.
  config.lora.rank = 0
  # The output of an adapter is multiplied with alpha / rank.
  config.lora.alpha = 64
  # Projections with an adapter: 'all-linear', or names separated by commas, such as 'q_proj,v_proj' (docs/models.md).
  config.lora.targets = 'all-linear'
  # Directory of initial adapters in PEFT's format; empty for fresh ones, whose output is 0 at first.
  config.lora.path = ''

  # -- Environments, by RAGEN's tags; `train.tags` and `eval.tags` choose among them. ---------------------------------
  # Common fields: `type` is the class (ragen_jax/envs); `max_turns` limits the replies of an episode, `max_actions` its
  # actions, and `max_actions_per_turn` the executed actions of one reply; `max_words` is the reply length that the
  # prompt requests. `max_response_tokens` is the maximum of one reply, at most `agent.max_response_tokens`, which holds
  # for 0; `max_observation_tokens`, from 32, the maximum of an observation's text, whose end is replaced by a mark such
  # as '[... 312 more tokens]' (0 for no cut; images stay whole); `request` replaces `agent.request` unless it is empty.
  # The other fields are options of the class. Values are those of RAGEN's first version if it has the tag.
  config.envs = environments.by_tag()

  # -- Training rollouts. ---------------------------------------------------------------------------------------------
  config.train = ConfigDict()
  # Tags of the training environments.
  config.train.tags = ('FrozenLake',)
  # Prompt groups per rollout; each is one level.
  config.train.groups = 64
  # Groups of each tag, in the order of the tags; empty divides them equally.
  config.train.tag_groups = ()
  # Episodes per group: they share the level, and differ in tokens and in the environment's randomness.
  config.train.group_size = 8
  # Iterations that learn from one rollout (RAGEN's Online-k): 1 is on-policy; more saves rollouts, but learns from an
  # older policy's episodes. It must divide num_iterations and checkpoint.every.
  config.train.online_k = 1
  # Seed of the first training level. Group g of rollout i has the seed first_level + i * groups + g; each `config.seed`
  # has its own range of 10 million. A board that equals a held-out board is replaced.
  config.train.first_level = 10_000
  # Temperature of sampling, and of the log-probs in the loss.
  config.train.temperature = 1.0
  # Sample from the smallest set of tokens with this much probability; 1 samples from all, as the loss assumes, and less
  # needs algorithm.old_logprobs='trainer'.
  config.train.top_p = 1.0
  # Sample from this many likeliest tokens; 0 samples from all, as the loss assumes, and other numbers need
  # algorithm.old_logprobs='trainer'.
  config.train.top_k = 0

  # -- Evaluation: the same held-out levels every time. ---------------------------------------------------------------
  config.eval = ConfigDict()
  # Tags of the evaluation environments; they need not be those of training, and each has metrics of its own.
  config.eval.tags = ('FrozenLake',)
  # Held-out levels.
  config.eval.groups = 256
  # Levels of each tag, in the order of the tags; empty divides them equally.
  config.eval.tag_groups = ()
  # Episodes per level; they differ in tokens and in the environment's randomness.
  config.eval.group_size = 4
  # Seed of the first held-out level; the seeds must not overlap with those of training. Results are reported on the
  # levels from 123 on; choose settings on others, such as the third set of docs/learning.md, the levels from 2000 on.
  config.eval.first_level = 123
  # Iterations between two evaluations, in addition to those before training and after the last iteration; 0 for no
  # others.
  config.eval.every = 10
  # Temperature of sampling; 0 takes the likeliest token.
  config.eval.temperature = 0.5
  # Sample from the smallest set of tokens with this much probability; 1 samples from all.
  config.eval.top_p = 1.0
  # Sample from this many likeliest tokens; 0 samples from all.
  config.eval.top_k = 0
  # Evaluate a second time with greedy decoding.
  config.eval.greedy_too = True
  # Checkpoint: 'latest', 'best' by held-out success, or the number of an iteration; 'base' is the config's model
  # without a checkpoint, and 'none' evaluates no model. This field is for --mode=eval, --mode=serve and
  # --mode=optimize_prompt, the following ones are for --mode=eval only.
  config.eval.step = 'latest'
  # Baselines on the same levels: 'random' (legal actions, valid replies) and 'solver' (optimal play, if the environment
  # has a solver).
  config.eval.baselines = ('random', 'solver')
  # Base address of an OpenAI-compatible server to evaluate, such as 'http://localhost:8000/v1'; empty for none. An API
  # key is read from the environment variable OPENAI_API_KEY.
  config.eval.endpoint = ''
  # Name of the server's model.
  config.eval.endpoint_model = ''
  # Time-out for one reply of the server, in seconds.
  config.eval.endpoint_timeout = 60.0
  # Requests in flight at a time.
  config.eval.endpoint_workers = 8
  # Attempts per reply; if all fail, the turn counts as an invalid reply.
  config.eval.endpoint_tries = 6
  # Maximum tokens of one reply, as the server counts them; 0 uses the server's limit.
  config.eval.endpoint_max_tokens = 512

  # -- Prompts, replies and limits in tokens. -------------------------------------------------------------------------
  config.agent = ConfigDict()
  # Form of replies: 'free_think', <think>...</think><answer>...</answer>; 'no_think', the answer alone; or VAGEN's
  # 'state_estimation', 'transition_modeling' and 'world_modeling', whose thought describes the board before the turn,
  # after it, or both (docs/vision.md).
  config.agent.format = 'free_think'
  # Put the tags before the reply's first text into the prompt; otherwise the policy has to write them.
  config.agent.force_prefix = True
  # Request for a reply, at the end of each turn's message. {form} becomes the form of replies, {example} a whole reply
  # with actions of the game, {actions} the names of all actions, and {max_words} the number of words of
  # `envs.TAG.max_words`. The built-in models know this wording only; that of pretrained models (`_real_model`) was
  # chosen by measurement (docs/real_models.md).
  config.agent.request = 'Answer as {form} and nothing else, in at most {max_words} words.'
  # Separator between the actions of one reply.
  config.agent.action_sep = '||'
  # Maximum tokens of one reply.
  config.agent.max_response_tokens = 32
  # Context of the policy: 'full', the whole conversation; 'limited_multi_turn', the conversation of the last turns;
  # 'single_turn', one message with a summary of the last turns. The latter two make a row of each turn.
  config.agent.context = 'full'
  # Turns in the context of 'limited_multi_turn' and 'single_turn', the current one included.
  config.agent.context_turns = 5
  # If the context is too long for another turn: 'end' the episode, or 'drop_oldest' turns from the context.
  config.agent.overlong = 'end'
  # Maximum tokens of a row: of a whole episode with full context, else of one turn and its context.
  config.agent.max_context = 512
  # Added to the reward of a turn whose reply has the wrong format or an unknown action; 0 or negative.
  config.agent.format_penalty = -0.1
  # When episodes have ended, sample with 3/4, 1/2, 5/16 or 1/8 of the rows of every device, if the others fit in these.
  # With the schedule 'lockstep', also when replies have ended and the others need another call.
  config.agent.drop_finished = True
  # When episodes get their next prompts: 'lockstep', all on the devices together, after the longest reply;
  # 'continuous', each as soon as its reply is complete. The sampled tokens are the same; log-probs differ by rounding.
  config.agent.schedule = 'lockstep'
  # Maximum tokens of each reply that the devices sample before the host looks for complete replies. With 'continuous'
  # it looks earlier if a quarter of the rows of a device have one.
  config.agent.decode_chunk = 32
  # Maximum number of episodes on the devices at a time, a multiple of the mesh's row shards; the others wait. Fewer are
  # on the devices if their memory holds fewer. 0: as many as fit.
  config.agent.rows_in_flight = 0
  # Number of threads in which rows of environments outside JAX play their turns, each as soon as it has replied, while
  # other rows sample: a slow row then delays no other. Of one environment at most its `workers` or `processes` play at
  # a time. Needs the schedule 'continuous' and one process. Which rows sample together then depends on time, so equal
  # runs have equal log-probs only up to rounding. 0: the rows that replied play together, and all rows wait for the
  # slowest.
  config.agent.env_threads = 0
  # Seconds that an episode in an environment outside JAX may take. After a turn beyond them it ends as an error of its
  # environment, which is counted and not trained. 0: no limit. Each step has a limit of its own, an option of the
  # environment such as step_timeout_s.
  config.agent.episode_timeout = 0.0
  # The same for all episodes of a rollout together, in seconds from its beginning. Both limits include the time of
  # compilation, and neither limits warm starts and --mode=play.
  config.agent.rollout_timeout = 0.0
  # Number of neighbouring devices that divide the weights of the MLP and of the vocabulary among them during sampling.
  # Each device then reads less for every token, but exchanges rows with the others twice a layer. Attention is not
  # divided. Must divide mesh.data * mesh.fsdp. 1: only mesh.tensor divides weights; 0: chosen for the model and chip.
  config.agent.decode_shards = 0

  # -- Agent programs over HTTP: --mode=serve, and training on tags of the type 'agent' (docs/agents.md). --------------
  config.serve = ConfigDict()
  # Address to bind. '127.0.0.1' is this machine only; others need the environment variable RAGEN_ADMIN_KEY.
  config.serve.host = '127.0.0.1'
  # Port; 0 chooses a free one.
  config.serve.port = 8000
  # Name of the policy in requests; 'policy:writer' also names the agent that calls.
  config.serve.model = 'policy'
  # Rows of the key/value cache: the maximum number of replies that are sampled at a time.
  config.serve.slots = 16
  # Maximum number of calls that wait for a row; further calls get the status 503.
  config.serve.max_queue = 4096
  # Maximum number of HTTP connections; fewer if the process may not open so many files.
  config.serve.max_connections = 4096
  # Largest body of a request, in bytes.
  config.serve.max_body = 16_777_216
  # Maximum number of images in a call; 0 refuses images. Images need a model with a vision tower.
  config.serve.max_images = 16
  # Maximum tokens of an image; larger images are scaled down.
  config.serve.image_tokens = 1280
  # Seconds for which a call goes on after its client has gone away, in case the client repeats it.
  config.serve.grace = 10.0
  # Attempts that the runner of `envs.Agent.runner` plays at a time.
  config.serve.max_concurrency = 16
  # Longest time of an attempt, in seconds.
  config.serve.timeout = 600.0
  # Longest time between two signs of life of an attempt, in seconds; 0 asks for none. The beginning and the end of a
  # call are signs of life. The local runner sends signs of life for the attempts that it plays.
  config.serve.heartbeat = 0.0
  # Maximum number of attempts at a rollout; if all fail, the rollout has failed.
  config.serve.max_attempts = 2
  # Hours for which the store keeps rollouts that are over and collected.
  config.serve.keep = 24.0
  # 0: synchronous training; all attempts of an iteration end, then the weights change. Above 0: asynchronous training;
  # programs go on playing during the update, and this is the maximum number of updates between the weights that sampled
  # a token and those that the update with this token starts from. Needs algorithm.tis_cap above 0.
  config.serve.max_staleness = 0
  # Agents whose tokens are trained, as a regular expression for the whole name; '' is the name of the default agent.
  config.serve.trained = '.*'
  # Agents that play with frozen weights and are not trained: entries 'AGENTS=MODEL'. AGENTS is a regular expression for
  # the whole name; the first entry that matches applies. MODEL is 'base', the model before training; WORKDIR@STEP, a
  # checkpoint of a run (STEP is an iteration, 'best' or 'latest'); the name of a preset; or the directory of a Hugging
  # Face checkpoint. The model must have the policy's tokenizer.
  config.serve.frozen = ()
  # What happens to a group if an attempt was cancelled or ended without a call: 'drop' the group, or 'keep' the other
  # attempts. Attempts that failed or got no reward stay in their group, and are not learnt from.
  config.serve.incomplete = 'drop'
  # Name of the rewards that are summed for the success of an episode; empty for all rewards.
  config.serve.success_reward = ''
  # An episode succeeds if these rewards sum to at least this number.
  config.serve.success_score = 1.0
  # Keep the thoughts of earlier replies in the conversation. Qwen3's own template leaves them out, so that each message
  # of the user begins a new row.
  config.serve.keep_thoughts = True
  # What the answer has for a tool call that is no JSON: 'content', its text; or 'arguments', a call with this text.
  config.serve.bad_calls = 'content'

  # -- The prompt of agent programs, and its search with --mode=optimize_prompt (docs/prompt_optimisation.md). ---------
  config.prompt = ConfigDict()
  # The prompt that programs read as `task.prompt`, and the first prompt of a search; empty for that in `prompt.file`,
  # or for no prompt.
  config.prompt.text = ''
  # A UTF-8 file with the prompt; must be empty with `prompt.text`.
  config.prompt.file = ''
  # Number of rounds of the search. This and the following fields are for --mode=optimize_prompt only.
  config.prompt.rounds = 3
  # Number of prompts that a round keeps for the next one.
  config.prompt.beam = 4
  # New prompts that a round makes from each prompt of the beam.
  config.prompt.branches = 4
  # Training tasks of one critique, which is written about their unsuccessful attempts.
  config.prompt.tasks = 4
  # Attempts at each task; they differ in the sampled tokens.
  config.prompt.attempts = 1
  # Held-out tasks on which every prompt is scored; the beam keeps the prompts with the highest mean scores.
  config.prompt.held_out = 32
  # Further held-out tasks on which the best prompt and the first one are compared at the end.
  config.prompt.final = 64
  # Score of an attempt that ended with an error or got no reward.
  config.prompt.failed_score = 0.0
  # Maximum length of a prompt, in characters.
  config.prompt.max_chars = 8000
  # Maximum characters of attempts in one request to the critic.
  config.prompt.shown_chars = 16_000
  # Base address of the OpenAI-compatible server of the model that writes critiques and prompts, such as
  # 'http://localhost:8001/v1'; empty for the policy itself.
  config.prompt.critic = ''
  # Name of this server's model.
  config.prompt.critic_model = ''
  # Name of the environment variable with this server's API key.
  config.prompt.critic_key = 'OPENAI_API_KEY'
  # Temperature of critiques and new prompts.
  config.prompt.critic_temperature = 1.0
  # Maximum tokens of one reply of the critic; 0 uses the server's limit. If the policy is the critic, at most
  # agent.max_response_tokens.
  config.prompt.critic_max_tokens = 2048
  # Time-out for one reply of the critic, in seconds.
  config.prompt.critic_timeout = 120.0
  # Requests to the critic in flight at a time.
  config.prompt.critic_workers = 4
  # Tries for one reply of the critic; if all fail, the round makes one new prompt less.
  config.prompt.critic_tries = 4

  # -- The update. ----------------------------------------------------------------------------------------------------
  config.algorithm = ConfigDict()
  # Advantage estimator: 'gae' (PPO), 'turn_wise_gae', 'bi_level_gae', 'grpo', 'dr_grpo', 'rloo', 'brpo', 'arpo',
  # 'reinforce_plus_plus', 'reinforce_plus_plus_baseline' or 'gigpo'; see ragen_jax/algorithms/advantages.py.
  config.algorithm.adv_estimator = 'gae'
  # Train on sampled tokens only, or (False) on every token of the episode, prompts included; False needs
  # mask_advantages=False.
  config.algorithm.mask_loss = True
  # Estimate advantages over sampled tokens only, or (False) over every token, which 'turn_wise_gae' cannot. False here
  # or in mask_loss needs old_logprobs='trainer'.
  config.algorithm.mask_advantages = True
  # Discount per sampled token.
  config.algorithm.gamma = 1.0
  # GAE's lambda per sampled token.
  config.algorithm.lam = 1.0
  # Discount per turn, in 'bi_level_gae' and 'turn_wise_gae'.
  config.algorithm.high_level_gamma = 0.95
  # GAE's lambda per turn, in 'bi_level_gae' and 'turn_wise_gae'; negative for the same as `lam`.
  config.algorithm.high_level_lam = -1.0
  # GAE's lambda of the critic's targets, per token and per turn; negative for that of the advantages. With 1 the
  # targets contain no values of the critic (VC-PPO, arXiv 2503.01491). Unused without a critic.
  config.algorithm.critic_lam = -1.0
  # Bootstrap with the critic's value after the last token of an episode that reached a limit of its budget. Otherwise
  # this value is 0, because the budget is part of the task that the prompt states. For estimators with a critic.
  config.algorithm.bootstrap_truncated = False
  # Divide the advantage by the episode's length relative to the mean length, in 'grpo' and 'dr_grpo'.
  config.algorithm.length_weight = False
  # Discount per turn in the step part of 'gigpo'.
  config.algorithm.step_gamma = 0.95
  # Weight of the step part of 'gigpo'.
  config.algorithm.step_weight = 1.0
  # Divide both parts of 'gigpo' by the standard deviations.
  config.algorithm.step_std = False
  # Whiten the advantages over the batch, in the GAE and REINFORCE++ families.
  config.algorithm.whiten_advantages = True
  # Loss of the policy: 'ppo' (clipped surrogate), 'cispo' (clipped importance weight), 'dppo_tv' or 'dppo_kl' (mask by
  # the divergence of the token's probability), 'sapo' (soft gate) or 'dro' (quadratic penalty of the log-ratio);
  # docs/algorithms.md has the equations. All but 'ppo' need ratio_level='token'.
  config.algorithm.policy_loss = 'ppo'
  # Span of a probability ratio: a 'token', the whole 'sequence' (GSPO, with clip ratios of about 3e-4), or a 'turn'.
  config.algorithm.ratio_level = 'token'
  # The probability ratio is clipped below 1 minus this. In 'dppo_tv' and 'dppo_kl', the largest divergence of tokens
  # with negative advantages (the paper: 0.15 or 0.2, and 0.05). In 'cispo', 1 is no lower bound.
  config.algorithm.clip_ratio_low = 0.2
  # The probability ratio is clipped above 1 plus this ("clip-higher"). In 'dppo_tv' and 'dppo_kl', the largest
  # divergence of tokens with positive advantages.
  config.algorithm.clip_ratio_high = 0.28
  # Bound of the dual clip for negative advantages in 'ppo', above 1; 0 is off.
  config.algorithm.clip_ratio_c = 3.0
  # Temperature of the gate of 'sapo' for positive advantages, above 0: the gradient falls faster with larger ones.
  config.algorithm.tau_pos = 1.0
  # Temperature of the gate of 'sapo' for other advantages, above 0.
  config.algorithm.tau_neg = 1.05
  # Weight of the penalty of 'dro', half the squared log-ratio, above 0.
  config.algorithm.dro_beta = 0.05
  # Values are clipped to this distance, in units of the reward, from the values at sampling; 0 is off.
  config.algorithm.value_clip = 0.5
  # Weight of the value loss, which is divided by the mean square of the returns, or of the values if that is larger
  # (but by 0.01 at least), and whose gradient reaches the shared trunk too. With a separate critic it scales the
  # critic's gradient before clipping. Unused without a critic.
  config.algorithm.value_coef = 0.05
  # Weight of the entropy bonus.
  config.algorithm.entropy_coef = 0.001
  # Weight of the KL to the initial policy in the loss; above 0 it needs a second copy of the trained weights.
  config.algorithm.kl_loss_coef = 0.0
  # Weight of the KL to the initial policy in the reward of every sampled token.
  config.algorithm.kl_reward_coef = 0.0
  # Estimator of the KL per token: 'k1' (log-ratio), 'abs', 'k2' (half its square) or 'k3' (low variance). As a loss,
  # 'k1' has no effect in expectation, because its expected gradient is 0.
  config.algorithm.kl_kind = 'k3'
  # Aggregation of token losses: 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum' or
  # 'seq-mean-token-sum-norm' (over `loss_norm_length`).
  config.algorithm.loss_agg_mode = 'token-mean'
  # Divisor of 'seq-mean-token-sum-norm', in tokens; 0 is the maximum that an episode can sample.
  config.algorithm.loss_norm_length = 0
  # Source of the old log-probs and values: 'sampler', recorded while sampling, or 'trainer', computed again by the
  # update's forward pass.
  config.algorithm.old_logprobs = 'sampler'
  # Truncated importance sampling: cap of the weights (the trainer's probability divided by the sampler's); 0 is off.
  # Needs old_logprobs='trainer'.
  config.algorithm.tis_cap = 0.0
  # Mixtures of experts only: the sampler records the experts that it gives each token to, and the update uses them in
  # place of those that its routers choose. See docs/models.md for what this costs.
  config.algorithm.replay_experts = False
  # Passes over the rollout per iteration.
  config.algorithm.ppo_epochs = 1

  # -- From the environment's rewards to those of the estimators. -----------------------------------------------------
  config.reward = ConfigDict()
  # Reward placement: 'turn', on the last sampled token of each turn, or 'trajectory', the sum on the last sampled token
  # of the episode.
  config.reward.credit = 'turn'
  # Scores are normalised over the 'state' (prompt group), 'inductive' (environment) or the whole 'batch'.
  config.reward.grouping = 'state'
  # Normalisation of scores: 'identity' (none), 'mean', 'mean_std' or 'asym_clip' (mean_std, clamped to -1..3);
  # not with turn credit.
  config.reward.method = 'identity'
  # Reward of a reply that is of its form (agent.format) and names actions that all exist; 0 is off. This reward and the
  # next are not part of scores in metrics and filters.
  config.reward.format_reward = 0.0
  # Reward of a description of the board without mistakes, for each section of the form that describes it; the reward of
  # other descriptions is smaller (docs/vision.md). 0 is off. For environments that know the places of things on their
  # boards, in rooms or on tables: FrozenLake, Sokoban, Navigation and Manipulation.
  config.reward.state_reward = 0.0
  # Score of a description, from 0 to below 1, up to which it is worth nothing.
  config.reward.state_floor = 0.5
  # Where the reward of a description is paid: on the last token of the 'turn', or of its 'section'.
  config.reward.state_place = 'turn'

  # -- The filter of prompt groups (StarPO-S). -------------------------------------------------------------------------
  config.filter = ConfigDict()
  # Score of a group: 'reward_std', 'reward', 'reward_sum', 'entropy', 'entropy_variance' or 'length'.
  config.filter.metric = 'reward_std'
  # Which groups are kept: 'top_k' (the share `value` of them), 'top_k_abs' (`value` groups), 'top_p' (the fewest that
  # cover the share `value` of the sum of scores) or 'min_p' (those with at least `value` times the greatest score).
  config.filter.strategy = 'top_p'
  # The share or the number of groups; 1 with 'top_p' keeps all.
  config.filter.value = 1.0
  # Keep the groups with the 'largest' or the 'smallest' scores.
  config.filter.type = 'largest'
  # Whether groups with score 0 may be kept; False drops them first, also if nothing else is filtered (DAPO).
  config.filter.include_zero = True
  # Terms of the sum in 'top_p': the scores ('linear') or their 'softmax'.
  config.filter.top_p_mode = 'linear'
  # Factor on the advantages: 'none', the kept share of groups ('linear') or its square root ('sqrt').
  config.filter.loss_scaling = 'none'
  # Instead of dropping groups, weight the advantages of each by its reward deviation relative to the largest one.
  config.filter.soft = False
  # Divide the kept groups over as many optimiser steps as without a filter, instead of fewer.
  config.filter.fixed_steps = True
  # Maximum rollouts per iteration: with more than 1, fresh groups are played until train.groups of them are kept.
  config.filter.max_rollouts = 1

  # -- Replay of the groups of earlier iterations. Needs algorithm.tis_cap, the bound of the importance weights. -------
  config.replay = ConfigDict()
  # Prompt groups drawn from the buffer in addition to the fresh ones; 0 is off.
  config.replay.groups = 0
  # Age in iterations above which a group is no longer drawn.
  config.replay.max_age = 2

  # -- The curriculum: which questions of data sets (envs of the type 'dataset') training plays (docs/datasets.md). ----
  config.curriculum = ConfigDict()
  # Order of the questions: 'sliding' (from a window that moves from the easiest to the hardest ones), 'growing' (from
  # the easiest ones, which become more until they are all), 'success' (more often those whose success rate is near
  # `target`), or empty for that of `envs.Dataset.order`. `envs.Dataset.fields.difficulty` names the field of the rows
  # that says how hard a question is; without it, their order in the file does.
  config.curriculum.order = ''
  # Iterations until the hardest questions are played, with 'sliding' and 'growing'; 0 for all of num_iterations.
  config.curriculum.iterations = 0
  # Share of the questions that is played at a time, with 'growing' at first; at least as many as an iteration plays.
  config.curriculum.window = 0.25
  # With 'success': the success rate of the questions that are played most often.
  config.curriculum.target = 0.5
  # With 'success': distance from `target` from which on a question is played as one of `explore` only. A question at
  # half the distance is half as likely as one at the target.
  config.curriculum.width = 0.5
  # With 'success': share of the groups, one at least, that play the questions that were not played for the longest
  # time. There, questions that were never played come first.
  config.curriculum.explore = 0.25
  # With 'success': weight of a question's earlier success rate against that of its last group.
  config.curriculum.ema_decay = 0.5

  config.optimizer = ConfigDict()
  # Learning rate of the policy.
  config.optimizer.actor_lr = 1e-3
  # Learning rate of the value head, or of the whole separate critic.
  config.optimizer.critic_lr = 1e-3
  # Number of initial iterations that train only the critic; with a shared trunk, only the value head.
  config.optimizer.critic_warmup = 0
  # Optimiser steps over which both learning rates rise linearly. The first step has 1 / warmup_steps of them.
  config.optimizer.warmup_steps = 0
  # Final fraction of the learning rates, reached linearly over all optimiser steps of the run; 1 keeps them constant.
  # If a filter reduces the number of steps, the decay does not reach it.
  config.optimizer.final_lr_fraction = 1.0
  # AdamW's decay rate of the mean of gradients.
  config.optimizer.b1 = 0.9
  # AdamW's decay rate of the mean of squared gradients.
  config.optimizer.b2 = 0.999
  # AdamW's weight decay; vectors (norms, biases) are not decayed.
  config.optimizer.weight_decay = 0.01
  # Maximum global norm of the gradient; the gradients of the policy and of a separate critic are clipped separately.
  config.optimizer.grad_clip = 1.0
  # Episodes per optimiser step.
  config.optimizer.mini_batch_size = 128
  # Rows that go through the model at once; their gradients add up to the gradient of the mini-batch. 0: as many as fit
  # in the memory of the devices; packed rows on one CPU: at most 8,192 columns.
  config.optimizer.micro_batch_size = 32
  # Put several rows behind one another into bins of a few widths, without attention between them. Then few programs are
  # compiled, and a mini-batch is one call; micro_batch_size limits how many columns go through the model at once.
  config.optimizer.packing = False

  # -- Supervised warm start (--mode=sft): imitation of exact solvers, or of given conversations. ---------------------
  config.sft = ConfigDict()
  # Output directory of the trained model, in Hugging Face format.
  config.sft.output = 'runs/sft/checkpoint'
  # File of conversations to learn from, one JSON per line (docs/warm_start.md); empty for solvers' play.
  config.sft.data = ''
  # File for the solvers' play in the same format; empty for none.
  config.sft.save_data = ''
  # Tags of the demonstrated environments; by default those of `train.tags`. With `data`, this field and all down to
  # `discount` have no effect, except that `from_scratch` makes the tokenizer from the prompts of these environments.
  config.sft.tags = config.train.get_oneway_ref('tags')
  # Levels of each tag, in the order of the tags.
  config.sft.levels = (4096,)
  # Forms of the demonstrated replies, see agent.format, among which the levels of a tag are divided; empty for
  # agent.format alone.
  config.sft.forms = ()
  # Demonstrations per level.
  config.sft.group_size = 1
  # Seed of the first level; the seeds must not overlap with those of evaluation.
  config.sft.first_level = 1_000_000_000
  # Replace levels whose board is also a held-out level of `eval`.
  config.sft.skip_held_out = True
  # Other shipped configs, by name, whose held-out levels are replaced as well.
  config.sft.skip_held_out_of = ()
  # Probability that a turn plays random actions, as many as the expert would.
  config.sft.noise = 0.0
  # Probability that a turn follows a naive plan, which for instance ignores that ice is slippery.
  config.sft.beginner = 0.0
  # Probability that only the first action of a turn is played.
  config.sft.timid = 0.0
  # Probability that the expert plans a turn as if it were the last, with more actions than necessary.
  config.sft.hurry = 0.5
  # Maximum actions of the expert per turn; 0 is the environment's limit.
  config.sft.actions_per_turn = 0
  # The expert's discount per action; below 1 it avoids detours.
  config.sft.discount = 0.97
  # Optimiser steps, 2 or more, because the first step has a learning rate of 0.
  config.sft.steps = 1000
  # Demonstrations, or conversations, per step.
  config.sft.batch_size = 64
  # Pack several of them into one row, without attention between them: less padding if their lengths differ.
  config.sft.packing = False
  # Steps at the beginning that learn from the first reply of each conversation only, which takes less time. A fresh
  # model that reads images learns to locate tiles sooner if the row has a single image.
  config.sft.short_steps = 0
  # Share of the levels, or of the conversations, that is held out to measure the validation loss.
  config.sft.val_fraction = 0.05
  # Steps between two evaluations, in addition to the one after the last step; 0 for no others.
  config.sft.eval_every = 0
  # Steps between two checkpoints, in addition to the one after the last step; 0 for no others.
  config.sft.checkpoint_every = 200
  # Peak learning rate; it rises over the first twentieth of the steps and falls to a tenth along a cosine.
  config.sft.learning_rate = 1e-4
  # Weight of the value head's loss: half the squared error against the rewards that the demonstration still
  # earned, divided by their mean square in the environment. 0 does not train the head.
  config.sft.value_coef = 0.0
  # Begin with fresh weights and a tokenizer made from the prompts of `tags`, instead of `model`.
  config.sft.from_scratch = False
  # Shape of the fresh model: width, layers, query heads, key/value heads, head width, MLP width.
  config.sft.shape = (64, 2, 4, 2, 16, 192)
  # Layers with linear attention before each layer with full attention; the fresh model is then a Qwen3.5, whose linear
  # heads have the number and the width of the query heads. 0 for full attention in all layers.
  config.sft.linear_layers = 0
  # Shape of the fresh model's vision tower: width, blocks, heads, MLP width; empty for a model that reads text only. An
  # image has a visual token for each 8 x 8 pixels. Needs model.vision='trained'.
  config.sft.tower = ()

  # -- A run's checkpoint as a Hugging Face directory (--mode=export). -------------------------------------------------
  config.export = ConfigDict()
  # Output directory; empty for <workdir>/export.
  config.export.output = ''
  # Checkpoint: 'latest', 'best' by held-out success, or the number of an iteration.
  config.export.step = 'latest'
  # Form of a model with LoRA: 'merged', adapters added to the weights, or 'adapter', a PEFT directory. Also for sft.
  config.export.lora = 'merged'
  # Dtype of the written weights: 'float32', 'bfloat16' or 'float16'. Also for sft.
  config.export.dtype = 'float32'
  # Repository on the Hugging Face Hub, 'USER/NAME', that --mode=export uploads the model to, with a card made from the
  # run; empty for none. HF_TOKEN or `hf auth login` gives access.
  config.export.push = ''
  # Data set on the hub, 'USER/NAME', that --mode=export uploads the run's episodes to; empty for none.
  config.export.push_episodes = ''
  # Whether repositories that do not exist yet are created as private ones.
  config.export.private = True

  # -- Devices. Rows are divided over data * fsdp, weights over fsdp and tensor. ---------------------------------------
  config.mesh = ConfigDict()
  # Number of groups of fsdp * tensor devices. Each group computes with all weights; between programs it keeps only its
  # part of the trained weights and of the optimiser's state. -1: the number of devices divided by fsdp * tensor.
  config.mesh.data = -1
  # Parts into which the weights and the optimiser's state are divided; each part has rows of its own too.
  config.mesh.fsdp = 1
  # Parts into which heads, MLP and vocabulary are divided.
  config.mesh.tensor = 1

  # -- Planning a machine (--mode=plan). -------------------------------------------------------------------------------
  config.plan = ConfigDict()
  # Chips whose compiler is asked, such as 'v5e:2x4', 'v5p:2x2x1' or 'h100:8'; '' predicts the memory only, on any
  # devices. The compiler must be installed (requirements-aot.txt). In place of plan.devices and plan.memory_gb.
  config.plan.topology = ''
  # Devices of the planned machine; `mesh` arranges them.
  config.plan.devices = 1
  # Memory of each device in GiB.
  config.plan.memory_gb = 24.0
  # Tokens of the longest observation, a first prompt, if agent.context is 'full'; otherwise it may fill the context.
  config.plan.prompt_tokens = 512
  # With plan.topology: tokens of each later observation.
  config.plan.observation_tokens = 80
  # With plan.topology: mean tokens of a reply, at most agent.max_response_tokens.
  config.plan.reply_tokens = 150
  # With plan.topology: tokens of a turn's longest reply, which decoding goes on to; at most agent.max_response_tokens.
  config.plan.longest_reply = 300
  # With plan.topology: turns of an episode, at most the largest max_turns of train.tags, which 0 stands for.
  config.plan.turns = 0

  # -- Detection of a collapse, and diagnostics. -----------------------------------------------------------------------
  config.monitor = ConfigDict()
  # Decay of the moving averages, which are logged as `<metric>_ema`.
  config.monitor.ema_decay = 0.9
  # Response to an Echo-Trap warning (docs/algorithms.md has the rule): 'warn', 'stop', or 'rollback' to the best
  # checkpoint with a smaller learning rate.
  config.monitor.echo_trap = 'warn'
  # Number of initial iterations whose means are the baselines of all rules.
  config.monitor.baseline_steps = 10
  # Signals needed for a warning, of reward deviation, entropy, gradient norm and repeated replies; a fall of the share
  # of replies of their form is a warning by itself.
  config.monitor.min_signals = 2
  # Consecutive iterations with that many signals before the warning.
  config.monitor.patience = 3
  # Factor on the learning rate at a rollback.
  config.monitor.rollback_lr = 0.5
  # Maximum rollbacks of a run; the next warning stops it.
  config.monitor.max_rollbacks = 3
  # Consecutive iterations with numbers that are not finite (NaN, infinity) after which the run ends with exit status 1,
  # or is rolled back if `echo_trap` is 'rollback'. In --mode=sft, consecutive skipped optimiser steps.
  config.monitor.max_bad_iterations = 3
  # Report a loss or gradient norm above this many times the median of its last `baseline_steps` values; 0 is off.
  config.monitor.spike_factor = 10.0
  # Stop after this many consecutive iterations with an in-group reward deviation below a tenth of its baseline; 0 is
  # off.
  config.monitor.flat_reward_patience = 0
  # Stop after this many consecutive evaluations with a success below 0.01 in all environments; 0 is off.
  config.monitor.hopeless_patience = 0
  # Stop after this many consecutive iterations in which the filter kept no group; 0 is off.
  config.monitor.empty_patience = 5
  # Iterations between two measurements of the mutual information between prompts and thoughts (RAGEN-2); 0 is off.
  config.monitor.information_every = 0
  # Replies and prompts that are scored against one another for the mutual information.
  config.monitor.information_samples = 32
  # Iterations between two measurements of the gradient norms of the loss's parts, by bucket of in-group reward
  # deviation; 0 is off.
  config.monitor.gradients_every = 0
  # Buckets of reward deviation for these gradient norms.
  config.monitor.gradient_buckets = 4
  # Buckets: 'quantile' (equal numbers of groups) or 'fixed_rv' (deviations 0 to 1, 1 to 2, ...).
  config.monitor.bucket_mode = 'quantile'

  config.checkpoint = ConfigDict()
  # Iterations between two checkpoints, in addition to the one after the last iteration; 0 for no others.
  config.checkpoint.every = 10
  # Newest checkpoints to keep, in addition to the one with the best held-out success (of those saved at an evaluation).
  # One that is saved because the run is interrupted stays until the next one, and takes the place of none of these.
  config.checkpoint.keep = 2

  config.logging = ConfigDict()
  # Episodes per environment that an evaluation, or an iteration, keeps for the trajectory viewer (--mode=view).
  config.logging.episodes = 16
  # Keep training episodes of the first iteration and of every iteration that is a multiple of this; 0 keeps evaluation
  # episodes only.
  config.logging.episodes_every = 5
  # Kept episodes per environment that are also written to TensorBoard, as text and pictures.
  config.logging.trajectories = 4
  # Tracker that gets scalars, config and the page of episodes beside TensorBoard: '' (none), 'wandb', 'trackio' or
  # 'mlflow' (requirements-trackers.txt). Keys, addresses and offline modes are those of the package's own environment
  # variables (docs/metrics.md).
  config.logging.tracker = ''
  # The tracker's project; in MLflow the experiment.
  config.logging.project = 'ragen-jax'

  # First and last iteration that are traced for xprof and TensorBoard, such as (3, 4); () for none
  # (docs/performance.md#profiles).
  config.profile = ()
  # Column counts of timelines and caches are multiples of this, so that few programs are compiled.
  config.length_step = 64
  # Directory for compiled programs, which later starts reuse; empty for none, 'auto' for <workdir>/xla_cache.
  config.compilation_cache = 'auto'
  # Threads that compile the programs of the next iterations while the run plays and learns; 0 for none. -1 takes a
  # quarter of the processors, at most 4, and none on CPUs or with several processes. Runs with images have none.
  config.compile_ahead = -1

  if config.model.preset in BUILT_IN:
    _limit_words(config, 25)  # fits agent.max_response_tokens
  else:
    _real_model(config)
    if config.model.preset.startswith(('qwen2.5-0.5b', 'qwen3-0.6b', 'smollm2-135m', 'smollm2-360m')):
      _limit_words(config, 10)  # asked for more, they often do not end their thought (docs/real_models.md)
  if adapters:
    _lora(config)
  environments.follow(config.envs)
  return config


def _limit_words(config: ConfigDict, most: int) -> None:
  for env in config.envs.values():
    env.max_words = min(env.max_words, most)


def _real_model(config: ConfigDict) -> None:
  """Settings for pretrained models: the paper's batch, lengths, learning rates and evaluation; packed updates."""
  config.num_iterations = 200
  config.model.remat = 'auto'
  config.model.logits_chunk = 2048
  config.train.groups = 8
  config.train.group_size = 16
  config.eval.group_size = 1
  config.eval.greedy_too = False
  config.agent.request = (
    'Answer in this form, in at most {max_words} words, and write nothing else:\n{form}\n'
    'The only actions are {actions}.\nAn example of a whole answer:\n{example}'
  )
  config.agent.max_response_tokens = 400
  config.agent.max_context = 3600
  config.agent.schedule = 'continuous'
  # Evaluations run the programs of training.
  config.agent.rows_in_flight = config.train.get_oneway_ref('groups') * config.train.get_oneway_ref('group_size')
  config.optimizer.actor_lr = 1e-6
  config.optimizer.critic_lr = 1e-5
  config.optimizer.mini_batch_size = 32
  config.optimizer.micro_batch_size = 0
  config.optimizer.packing = True
  config.length_step = 128


def _lora(config: ConfigDict) -> None:
  """RAGEN's preset (base-lora): rank and alpha 64; for pretrained models, ten times the learning rates."""
  config.lora.rank = 64
  config.lora.alpha = 64
  if config.model.preset not in BUILT_IN:
    config.model.param_dtype = 'bfloat16'  # as the models are published
    config.optimizer.actor_lr = 1e-5
    config.optimizer.critic_lr = 1e-4
