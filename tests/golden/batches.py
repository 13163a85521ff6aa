"""Makes the batches of tests/golden/batches with the functions of other systems: the true ones, and `planted-*`, in which
the system did something else than the settings of the file say.

    pip install trl==1.16.0
    python3 tests/golden/batches.py trl
    python3 tests/golden/batches.py openrlhf SOURCE      # a checkout of OpenRLHF 0.11.0; nothing of it is installed
    python3 tests/golden/batches.py verl SOURCE          # a checkout of verl 0.8.0.dev

The hooks of jobs/tools write the files. The policy that is updated is tests/golden/models/qwen3, the critic
tests/golden/models/reward. The policy at rollout, the reference and the critic at rollout are these with noise.
"""

import importlib.machinery
import importlib.metadata
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Space
from unittest.mock import MagicMock

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
POLICY, CRITIC, OUT = HERE / "models/qwen3", HERE / "models/reward", HERE / "batches"
sys.path.insert(0, str(HERE.parents[1] / "jobs/tools"))
WORK = tempfile.mkdtemp()
os.environ |= {"DUMP_BATCH": WORK, "DUMP_BATCH_STEPS": "1000000"}
PAD, END = 0, 2


class Absent:
    """Modules of other systems that a computation on a CPU does not use."""

    names = "PIL orjson aiohttp bitsandbytes jsonlines pylatexenc ray deepspeed flash_attn vllm torchdata tensordict omegaconf hydra codetiming pybind11".split()

    def find_spec(self, name, path=None, target=None):
        is_absent = name.split(".")[0] in self.names and not name.startswith("flash_attn.ops")
        return importlib.machinery.ModuleSpec(name, self) if is_absent else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


def noisy(model, scale, seed):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * p.std().nan_to_num(0.0) * torch.randn(p.shape, generator=noise)
    return model


def policy():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32, attn_implementation="eager")


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def write(name, path, settings=None, left_out=(), **more):
    """Keeps a file of the hook, with other settings if it is a planted one."""
    tensors, own = read(path)
    own = (settings or own) | {key: str(value) for key, value in more.items()}
    tensors = {key: x for key, x in tensors.items() if key not in left_out}
    save_file(tensors, OUT / f"{name}.safetensors", own)
    print(name, {key: tuple(x.shape) for key, x in tensors.items()})
    return own


def trl():
    import dump_batch_trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": PAD, "<s>": 1, "</s>": END} | {f"w{i}": i for i in range(3, 131)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    prompts = [{"prompt": " ".join(f"w{3 + (7 * i + j) % 120}" for j in range(3 + i % 3))} for i in range(8)]
    golden = policy().state_dict()

    def score(completions, **_):
        return [0.1 * len(c.split()) + sum(int(w[1:]) % 3 == 0 for w in c.split() if w[1:].isdigit()) for c in completions]

    class Restore(TrainerCallback):
        """The first step leaves the policy of the rollout, and the second one updates the golden policy."""

        def on_step_end(self, args, state, control, model=None, **_):
            model.load_state_dict(golden)

    def run(change=None, **options):
        base = dict(
            output_dir=f"{WORK}/trl", per_device_train_batch_size=8, num_generations=4, max_completion_length=10, max_steps=2,
            num_iterations=2, beta=0.05, epsilon=0.2, loss_type="grpo", temperature=0.9, use_cpu=True, bf16=False, report_to=[],
            seed=3, save_strategy="no", generation_kwargs={"sequence_bias": [[[END], 2.5]]}, logging_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False,
        )
        model = noisy(policy(), 0.05, 1)
        trainer = GRPOTrainer(model, score, GRPOConfig(**(base | options)), Dataset.from_list(prompts),
                              processing_class=tokenizer, callbacks=[Restore()])
        if trainer.ref_model is not None:
            noisy(trainer.ref_model, 0.05, 2)
        if change:
            change(trainer)
        dump_batch_trl.dump(trainer)
        trainer.train()
        return max(Path(WORK).glob("trl-update-*"), key=lambda path: int(path.name.split("-")[2]))

    def without_end(trainer):
        compute = trainer._compute_loss
        of = lambda inputs: (inputs["completion_ids"] != END).long()
        trainer._compute_loss = lambda model, inputs: compute(model, inputs | {"tool_mask": of(inputs)})

    own = write("trl-grpo", run(), model="../models/qwen3")
    write("trl-bnpo", run(loss_type="bnpo", gradient_accumulation_steps=2, per_device_train_batch_size=4, steps_per_generation=2), model="../models/qwen3")
    write("trl-dapo", run(loss_type="dapo", epsilon_high=0.28, delta=1.5, gradient_accumulation_steps=2, per_device_train_batch_size=4, steps_per_generation=2), model="../models/qwen3")
    write("trl-gspo", run(importance_sampling_level="sequence", scale_rewards="batch", epsilon=3e-2, use_bias_correction_kl=False), model="../models/qwen3")
    planted = {
        "token-mean": dict(loss_type="bnpo"),
        "constant-length": dict(loss_type="dr_grpo"),
        "group-std": dict(scale_rewards="none"),
        "clip": dict(epsilon=0.1),
        "temperature": dict(temperature=1.0),
        "masked-end": dict(change=without_end),
        "kl-coef": dict(beta=0.01),
    }
    for name, change in planted.items():
        write(f"planted-trl-{name}", run(**change), own)
    ratio = run(importance_sampling_level="sequence", use_bias_correction_kl=False)
    write("planted-trl-sequence-ratio", ratio, own | {"ppo.kl_weighted": "false"})
    write("planted-trl-kl-weight", run(use_bias_correction_kl=False), own)


def rows():
    """Ids and masks of two groups of four rows, padded on the right; responses end with END or at their longest."""
    numbers = random.Random(5)
    prompts = [[numbers.randrange(3, 131) for _ in range(n)] for n in (3, 5)]
    all = []
    for i in range(8):
        n = numbers.randrange(4, 11)
        response = [numbers.randrange(3, 131) for _ in range(n)] + ([END] if n < 10 else [])
        all.append((prompts[i // 4], response))
    width = max(len(p) + len(r) for p, r in all)
    ids = torch.tensor([p + r + [PAD] * (width - len(p) - len(r)) for p, r in all])
    attention = torch.tensor([[1] * (len(p) + len(r)) + [0] * (width - len(p) - len(r)) for p, r in all])
    action = torch.tensor([[0] * (len(p) - 1) + [1] * len(r) + [0] * (width - len(p) - len(r)) for p, r in all])
    return ids, attention, action


def openrlhf(source):
    sys.path.insert(0, source)
    sys.meta_path.append(Absent())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: Path(source, "version.txt").read_text().strip() if name == "openrlhf" else version(name)
    import dump_batch_openrlhf
    import openrlhf.trainer.ppo_utils.experience_maker as makers
    import openrlhf.trainer.ray.ppo_actor as actors
    import openrlhf.trainer.ray.ppo_critic as critics
    from openrlhf.models import Actor, PolicyLoss, ValueLoss, get_llm_for_sequence_regression
    from openrlhf.trainer.ppo_utils.experience import Experience

    for module in (makers, actors, critics):
        dump_batch_openrlhf.wrap(vars(module))
    ids, attention, action = rows()
    new = lambda of, **values: vars(one := object.__new__(of)).update(values) or one

    def options(estimator="gae", use_loss=False, kl="k3", lambd=0.95, no_std_norm=False, clip=0.2, dual_clip=None, value_clip=0.2, gamma=0.99):
        return Space(
            algo=Space(
                advantage=Space(estimator=estimator, gamma=gamma, lambd=lambd, no_std_norm=no_std_norm, is_correction_enable=False,
                                is_correction_type="tis", is_correction_threshold=None),
                kl=Space(use_loss=use_loss, estimator=kl, init_coef=0.05),
            ),
            actor=Space(policy_loss_type="ppo", eps_clip_low_high=(clip, clip), dual_clip=dual_clip, entropy_coef=None, aux_loss_coef=0.0),
            critic=Space(value_clip=value_clip), reward=Space(clip_range=(-10.0, 10.0), overlong_buffer_len=None, stop_properly_penalty_coef=None),
            rollout=Space(temperature=1.0, n_samples_per_prompt=4, micro_batch_size=4, max_new_tokens=10),
            train=Space(dynamic_batch_enable=False, colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False),
            ds=Space(ring_attn_size=1, tensor_parallel_size=1),
        )

    class Maker(makers.RemoteExperienceMaker):
        """Calls the models here instead of remote ones."""

        def _dispatch_forward(self, group, wait, **given):
            pairs = zip(given["sequences"], given["action_mask"], given["attention_mask"])
            return [group(s, action_mask=a, attention_mask=m) for s, a, m in pairs]

        def _flatten_results(self, found, duplicate_factor):
            return found if isinstance(found, list) else [None, None]

    def value(scale):
        made = get_llm_for_sequence_regression(str(CRITIC), "critic", param_dtype="bf16", attn_implementation="eager", value_head_prefix="score")
        made = made.float()
        made.load_state_dict(load_file(CRITIC / "model.safetensors"))
        return noisy(made, scale, 3)

    def norm(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    def last(name):
        return max(Path(WORK).glob(f"openrlhf-{name}-*"), key=lambda path: int(path.name.split("-")[2]))

    def run(mask=None, **changed):
        args = options(**changed)
        strategy = Space(args=args, ring_attn_group=None, accumulated_gradient=1, backward=lambda loss, *_: loss.backward(),
                         optimizer_step=lambda *_, **__: None, get_grad_norm=norm)

        def wrapped(scale, seed):
            made = Actor(noisy(policy(), scale, seed), temperature=args.rollout.temperature)
            made.packing_samples = False
            return made

        maker = new(Maker, strategy=strategy, args=args, advantage_estimator=args.algo.advantage.estimator, kl_ctl=Space(value=0.05),
                    actor_model_group=wrapped(0.05, 1), initial_model_group=wrapped(0.05, 2), reward_model_group=None,
                    critic_model_group=value(0.05) if args.algo.advantage.estimator == "gae" else None)
        scores = torch.linspace(-1.0, 2.0, 8)[torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])]
        parts = [Experience(sequences=ids[i : i + 4], attention_mask=attention[i : i + 4], action_mask=action[i : i + 4],
                            rewards=scores[i : i + 4], index=list(range(i, i + 4))) for i in (0, 4)]
        experiences = maker.compute_advantages_and_returns(maker.make_experience(parts))
        whole = Experience(**{key: torch.cat([getattr(e, key) for e in experiences])
                              for key in ("sequences", "attention_mask", "action_mask", "action_log_probs", "values", "returns", "advantages", "base_action_log_probs")
                              if getattr(experiences[0], key) is not None})
        losses = PolicyLoss(*args.actor.eps_clip_low_high, dual_clip=args.actor.dual_clip), ValueLoss(args.critic.value_clip)
        if mask:
            losses[0].register_forward_pre_hook(lambda _, given, more: (given, more | {"action_mask": mask(more["action_mask"])}), with_kwargs=True)
        scheduler = Space(get_last_lr=lambda: [0.0])
        common = dict(strategy=strategy, args=args, aux_loss=False, replay_buffer=None, ema_model=None)
        actor = new(actors.ActorPPOTrainer, actor=wrapped(0.0, 0), actor_loss_fn=losses[0], actor_optim=None, actor_scheduler=scheduler, **common)
        actor.training_step(whole, 0.05, 0)
        if whole.values is not None:
            critic = new(critics.CriticPPOTrainer, critic=value(0.0), critic_loss_fn=losses[1], critic_optim=None, critic_scheduler=scheduler, **common)
            critic.training_step(whole, 0)
        return {name: last(name) for name in ("rollout", "actor", "critic")}

    models = dict(model="../models/qwen3", critic="../models/reward")
    files = run()
    own = {"rollout": write("openrlhf-ppo-rollout", files["rollout"])}
    own["actor"] = write("openrlhf-ppo-actor", files["actor"], model=models["model"])
    own["critic"] = write("openrlhf-ppo-critic", files["critic"], left_out=("values_of_model",), critic=models["critic"])
    files = run(estimator="group_norm", use_loss=True, kl="k2", gamma=1.0, dual_clip=1.1)
    write("openrlhf-grpo-rollout", files["rollout"])
    write("openrlhf-grpo-actor", files["actor"], model=models["model"])
    planted = {
        "rollout-k1": dict(kl="k1"),
        "rollout-no-division": dict(no_std_norm=True),
        "rollout-lambda": dict(lambd=0.8),
        "actor-dual-clip": dict(dual_clip=1.1),
        "actor-mask-left": dict(mask=lambda mask: torch.nn.functional.pad(mask[:, 1:], (0, 1))),
        "actor-mask-right": dict(mask=lambda mask: torch.nn.functional.pad(mask[:, :-1], (1, 0))),
        "critic-value-clip": dict(value_clip=None),
    }
    for name, change in planted.items():
        of = name.split("-")[0]
        write(f"planted-openrlhf-{name}", run(**change)[of], own[of])


def verl(source):
    import transformers

    sys.path.insert(0, source)
    sys.meta_path.append(Absent())
    transformers.AutoModelForVision2Seq = None  # a name of transformers 4
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: Path(source, "verl/version/version").read_text().strip() if name == "verl" else version(name)
    import dump_batch_verl
    import verl.trainer.ppo.ray_trainer as trainers
    import verl.workers.actor.dp_actor as actors
    import verl.workers.critic.dp_critic as critics
    import numpy
    from verl import DataProto

    for module in (trainers, actors, critics):
        dump_batch_verl.wrap(vars(module))

    class Keys(dict):
        def __getattr__(self, key):
            if key not in self:
                raise AttributeError(key)
            return self[key]

    new = lambda of, **values: vars(one := object.__new__(of)).update(values) or one
    ids, attention, action = rows()
    # verl has prompts with padding on the left, and responses with padding on the right.
    split = [int(a.argmax()) + 1 for a in action]
    both = [(ids[i, :n].tolist(), ids[i, n : n + int(action[i].sum())].tolist()) for i, n in enumerate(split)]
    longest = [max(len(part[k]) for part in both) for k in (0, 1)]
    prompts = torch.tensor([[PAD] * (longest[0] - len(p)) + p for p, _ in both])
    responses = torch.tensor([r + [PAD] * (longest[1] - len(r)) for _, r in both])
    masks = [torch.tensor([[0] * (longest[0] - len(p)) + [1] * len(p) for p, _ in both]), torch.tensor([[1] * len(r) + [0] * (longest[1] - len(r)) for _, r in both])]
    common = dict(prompts=prompts, responses=responses, response_mask=masks[1], input_ids=torch.cat([prompts, responses], 1), attention_mask=torch.cat(masks, 1))
    common["position_ids"] = (common["attention_mask"].cumsum(1) - 1).clamp(min=0)
    common["token_level_rewards"] = torch.zeros(responses.shape)
    for i, score in enumerate(torch.linspace(-1.0, 2.0, 8)[torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])]):
        common["token_level_rewards"][i, int(masks[1][i].sum()) - 1] = score

    def parallel(of, module, **config):
        keys = Keys(ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=8, ppo_epochs=2, use_dynamic_bsz=False, grad_clip=1e9, **config)
        kind = "critic" if "Critic" in of.__name__ else "actor"
        return new(of, config=keys, use_remove_padding=False, use_prefix_grouper=False, use_fused_kernels=False, use_ulysses_sp=False,
                   ulysses_sequence_parallel_size=1, device_name="cpu", param_dtype=torch.float32, scaler=None,
                   **{f"{kind}_module": module, f"{kind}_optimizer": torch.optim.SGD(module.parameters(), lr=0.0)})

    def actor(module, **changed):
        keys = dict(loss_agg_mode="token-mean", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, entropy_coeff=0.0,
                    calculate_entropy=False, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.05, policy_loss={"loss_mode": "vanilla"},
                    global_batch_info={}, loss_scale_factor=None)
        return parallel(actors.DataParallelPPOActor, module, **(keys | changed))

    def logprobs(scale, seed):
        data = DataProto.from_dict({key: common[key] for key in ("responses", "input_ids", "attention_mask", "position_ids")},
                                   meta_info=dict(micro_batch_size=8, temperature=0.7, use_dynamic_bsz=False))
        return actor(noisy(policy(), scale, seed)).compute_log_prob(data)["log_probs"]

    def run(**changed):
        data = DataProto.from_dict(common | dict(old_log_probs=logprobs(0.05, 1), ref_log_prob=logprobs(0.05, 2)),
                                   {"uid": numpy.array(list("aaaabbbb"), dtype=object)}, dict(temperature=0.7))
        data = trainers.compute_advantage(data, trainers.AdvantageEstimator.GRPO, config={})
        actor(policy(), **changed).update_policy(data)
        files = [sorted(Path(WORK).glob(f"verl-{name}-*"), key=lambda path: int(path.name.split("-")[2])) for name in ("rollout", "actor")]
        return files[0][-1], files[1][-1]

    rollout, update = run()
    write("verl-grpo-rollout", rollout)
    own = write("verl-grpo-actor", update, model="../models/qwen3")
    write("planted-verl-sum-norm", run(loss_agg_mode="seq-mean-token-sum-norm")[1], own)
    write("planted-verl-clip-high", run(clip_ratio_high=0.2)[1], own)
    noise = torch.Generator().manual_seed(7)
    data = DataProto.from_dict(common | dict(values=torch.randn(responses.shape, generator=noise) * common["response_mask"]))
    trainers.compute_advantage(data, trainers.AdvantageEstimator.GAE, gamma=0.99, lam=0.9, config={})
    write("verl-ppo-rollout", max(Path(WORK).glob("verl-rollout-*"), key=lambda path: int(path.name.split("-")[2])))


OUT.mkdir(exist_ok=True)
torch.set_num_threads(1)
{"trl": trl, "openrlhf": openrlhf, "verl": verl}[sys.argv[1]](*sys.argv[2:])
shutil.rmtree(WORK)
