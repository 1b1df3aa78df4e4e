"""All settings of `trainer ...`: flags (`--set a.b=value`), then environment, then the TOML file.

The file is the one that the proxy reads too; its tables are the fields below:

    model = "path/to/a/huggingface/folder"
    [batches]
    groups = 16
    [optim]
    lr = 1e-6

A wrong setting fails before anything starts, with its name and what is allowed. The resolved
settings are stored with every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict

from tracegrad.chat.model_folder import find_model_folder
from tracegrad.log_format import LogFormat
from tracegrad.proxy.config import ProxySettings, SecretUrl, unguarded_host
from tracegrad.settings_sources import (
    FileSettings,
    unknown_settings,
)
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.config.data import DataSettings
from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.model_folders import (
    check_model_folder,
    last_resolved,
    model_folders,
)
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.config.push import PushSettings
from tracegrad_trainer.config.push_transport import check_transport
from tracegrad_trainer.config.resample import ResampleSettings, check_resampling
from tracegrad_trainer.config.served_adapter import why_not_served
from tracegrad_trainer.config.vllm import VllmSettings, serves_fp8
from tracegrad_trainer.engine import CheckpointSettings, FsdpSettings, OptimSettings
from tracegrad_trainer.guards.config import GuardSettings
from tracegrad_trainer.losses import PRESETS, ObjectiveSettings
from tracegrad_trainer.losses.part_names import SUPERVISED, WEIGHTS
from tracegrad_trainer.metrics import MetricsSettings
from tracegrad_trainer.rewards.config import RewardSettings

# What other trainers (TRL, verl, transformers) call a setting.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "batch_size": "batches.groups",
    "train_batch_size": "batches.groups",
    "num_generations": "batches.group_size",
    "rollout_n": "batches.group_size",
    "max_length": "batches.max_row_tokens",
    "grad_clip": "optim.max_grad_norm",
    "clip_grad": "optim.max_grad_norm",
    "num_iterations": "optim.epochs",
    "ppo_epochs": "optim.epochs",
    "lr_scheduler_type": "optim.schedule",
    "kl_beta": "objective.kl_coef",
    "kl_loss_coef": "objective.kl_coef",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "clip_ratio": "objective.clip_low",
    "entropy_coeff": "objective.entropy_coef",
    "algorithm": "objective.preset",
    "loss_type": "objective.preset",
    "model_path": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "output_dir": "state_dir",
    "num_gpus": "ranks",
    "tensor_parallel_size": "vllm.tensor_parallel",
    "data_parallel_size": "vllm.data_parallel",
    "max_model_length": "vllm.max_model_len",
    "lora_rank": "fsdp.lora.rank",
    "lora_alpha": "fsdp.lora.alpha",
    "max_concurrent_rollouts": "data.in_flight",
    "max_inflight_rollouts": "data.in_flight",
    "max_head_offpolicyness": "batches.max_staleness",
    "max_off_policy_steps": "batches.max_staleness",
    "max_async_level": "batches.max_staleness",
}


# What calls wait for an engine on GPUs that the ranks share, where [proxy] does not say it.
LONGEST_SHARED_STEP_S = 3600.0


class PushedProxySettings(ProxySettings):
    """The proxy as a trainer sees it. Whether its host needs an admin key is for whoever opens the
    port: ranks have no such key."""

    @field_validator("host")
    @classmethod
    def _host_is_loopback_or_guarded(cls, value: str, info: ValidationInfo) -> str:
        unguarded_host(value, has_admin_key=True)
        return value


class TrainerSettings(FileSettings):
    """What `trainer serve` needs to know. Environment: `TRACEGRAD_TRAINER_<TABLE>__<NAME>`."""

    model_config = SettingsConfigDict(
        env_prefix="TRACEGRAD_TRAINER_", env_nested_delimiter="__", extra="forbid"
    )

    model: Path = Field(
        description="a Hugging Face folder (config, tokenizer, safetensors), or a model's name on"
        " the Hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION; a state_dir keeps the"
        " commit that it began with"
    )
    reference: Path | None = Field(
        None,
        description="such a folder or name: what KL, DPO and KTO compare with; default: the"
        " model's",
    )
    state_dir: Path = Field(Path(".tracegrad"), description="store, checkpoints, logs")
    ranks: int = Field(
        1,
        ge=1,
        description="FSDP ranks, on a CPU one or two; default where GPUs train: one on each",
    )
    seed: int = Field(0, description="of everything random in the trainer")
    max_steps: int | None = Field(None, ge=1, description="end after this step")
    max_restarts: int = Field(
        5,
        ge=0,
        description="a part of `trainer serve` (vLLM, the proxy, the ranks) that ends or answers no"
        " more is started again, so many times in a row with nothing achieved between them: a"
        " minute of service, or a step of the ranks; scorers and others that no call needs are"
        " tried again for ever; 0: the first end of any ends the run",
    )
    proxy_url: str | None = Field(
        None,
        description="base URL of a proxy that others started, in front of the same vLLM: weights"
        " are pushed through its gate, and `trainer serve` starts none (docs/attach.md); default:"
        " where proxy.host and proxy.port say",
    )
    log_format: LogFormat = Field(
        "text",
        description="json: the logs of all parts but vLLM are one JSON object a line; the proxy's"
        " too, unless proxy.log_format says another",
    )
    proxy: PushedProxySettings = Field(default_factory=lambda: PushedProxySettings())
    vllm: VllmSettings
    gpus: GpuSettings = GpuSettings()
    data: DataSettings = DataSettings()
    batches: BatchSettings = BatchSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optim: OptimSettings = OptimSettings()
    fsdp: FsdpSettings = FsdpSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    rewards: RewardSettings = RewardSettings()
    resample: ResampleSettings = ResampleSettings()
    guards: GuardSettings = GuardSettings()
    push: PushSettings = PushSettings()
    promotion: PromotionSettings = PromotionSettings()
    metrics: MetricsSettings = MetricsSettings()

    @field_validator("model", "reference")
    @classmethod
    def _model_is_a_folder(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        check_model_folder(path)
        return path.resolve()

    @field_validator("proxy_url")
    @classmethod
    def _proxy_url_is_a_base_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no base URL: write it as http://HOST:PORT")
        return None if url is None else url.rstrip("/").removesuffix("/v1")

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.resolve()

    @classmethod
    def find_model(cls, name: str, *, pinned_by: Path | None) -> Path:
        """The folder of a model that is named as on the Hub. Raises ModelNotFound."""
        return find_model_folder(name, pinned_by=pinned_by)

    @model_validator(mode="before")
    @classmethod
    def _vllm_is_ours(cls, data: Any) -> Any:
        """vLLM serves the model that is trained; its log and its socket are in our folder."""
        if not isinstance(data, dict) or "model" not in data:
            return data

        def find(name: str, *, pinned_by: Path | None) -> Path:
            # Gigabytes are not fetched for settings that are refused after that.
            if unknown := unknown_settings(data, TrainerSettings, SYNONYMS):
                raise ValueError("; ".join(map(": ".join, unknown.items())))
            return cls.find_model(name, pinned_by=pinned_by)

        state_dir = Path(data.get("state_dir", ".tracegrad")).resolve()
        data = data | model_folders(data, last_resolved(state_dir), find)
        ours = {"log": state_dir / "logs" / "vllm.log", "socket": state_dir / "run" / "vllm.sock"}
        vllm = {"model": str(data["model"])} | ours | data.get("vllm", {})
        return _with_fp8_correction(data | {"vllm": vllm})

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.proxy.port == 0:
            raise ValueError("proxy.port: 0 is no port here; name the one that agents call")
        if self.proxy.port == self.vllm.port:
            raise ValueError(f"proxy.port and vllm.port are both {self.vllm.port}: take two")
        return self

    @model_validator(mode="after")
    def _proxies_have_an_address(self) -> Self:
        proxies = self.push.proxies
        if proxies and self.proxy_url is None:
            raise ValueError(
                "push.proxies: names proxies that others started behind one address: set proxy_url"
                " to that one, which agents call"
            )
        if len(set(proxies)) < len(proxies):
            raise ValueError("push.proxies: names a proxy twice: leave it out")
        return self

    @model_validator(mode="after")
    def _groups_where_they_are_needed(self) -> Self:
        name, compares = self.objective.advantage, self.objective.compares
        if self.batches.group_size == 1 and compares:
            raise ValueError(
                f"objective.advantage = {name!r} compares the rollouts of a group, and"
                " batches.group_size is 1: raise it, or set objective.advantage = 'running'"
            )
        if "drop_equal_reward" not in self.batches.model_fields_set:
            self.batches = self.batches.model_copy(update={"drop_equal_reward": compares})
        return self

    @model_validator(mode="after")
    def _one_judge_of_groups(self) -> Self:
        if self.rewards.judge is not None and self.batches.group_size == 1:
            raise ValueError(
                "rewards.judge compares the rollouts of a group, and batches.group_size is 1: raise"
                " it, or score rollouts by a function (rewards.functions)"
            )
        if self.rewards.composes and self.objective.judge is not None:
            raise ValueError(
                "objective.judge gives the reward itself, and so would the sum of [rewards]: leave"
                " one of them out"
            )
        return self

    @model_validator(mode="after")
    def _anchors_come_in_groups(self) -> Self:
        anchors = self.proxy.anchors
        if anchors is not None and "group_size" not in anchors.model_fields_set:
            anchors = anchors.model_copy(update={"group_size": self.batches.group_size})
            self.proxy = self.proxy.model_copy(update={"anchors": anchors})
        return self

    @model_validator(mode="after")
    def _negatives_are_known(self) -> Self:
        bounds = ("negative_max_tokens", "negative_max_turns")
        given = [name for name in bounds if getattr(self.batches, name) is not None]
        objective = self.objective
        if given and (objective.advantage == "gae" or objective.surrogate in SUPERVISED):
            raise ValueError(
                f"batches.{given[0]}: objective {objective.preset!r} has no advantages before its"
                " forward to recognise failures by; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_paths_where_they_must(self) -> Self:
        if self.batches.shared_prefix == "tree" and self.objective.needs_paths:
            raise ValueError(
                f"batches.shared_prefix = 'tree': objective {self.objective.preset!r} needs one"
                " path a row (its z is of one prompt and one completion); set it to 'paths'"
            )
        return self

    @model_validator(mode="after")
    def _intake_has_room_for_a_batch(self) -> Self:
        data, batches = self.data, self.batches
        if data.over_sample and batches.group_size == 1:
            raise ValueError(
                "data.over_sample: groups of one rollout are not cut (batches.group_size = 1);"
                " leave it out"
            )
        if data.in_flight is not None and data.in_flight < self.rollouts_of_batch:
            attempts = f"(group_size {batches.group_size} + over_sample {data.over_sample})"
            raise ValueError(
                f"data.in_flight = {data.in_flight}: a batch is never whole with fewer rollouts"
                f" than {self.rollouts_of_batch} (batches.groups {batches.groups} x {attempts});"
                " raise it, or make the batch smaller"
            )
        if data.synchronous and batches.stale == "weight":
            raise ValueError(
                "data.synchronous: no turn lags, and batches.stale = 'weight' weighs those that do;"
                " leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _resampled_rollouts_are_trained(self) -> Self:
        if self.resample.prompts == "none":
            return self
        judged = self.rewards.composes or self.objective.judge is not None
        check_resampling(self.data, self.batches, judged=judged)
        return self

    @model_validator(mode="after")
    def _objective_uses_what_is_set(self) -> Self:
        name = self.objective.preset
        if self.batches.stale == "weight" and not self.objective.weighs_turns:
            raise ValueError(
                f"batches.stale = 'weight' weighs the advantages of turns, and objective {name!r}"
                " does not read them: set it to 'drop'"
            )
        if self.data.refill and not self.batches.drop_equal_reward:
            raise ValueError(
                "data.refill replaces groups of equal rewards, and they are trained here"
                f" (objective {name!r} does not compare, or batches.drop_equal_reward is false):"
                " leave it out"
            )
        if self.reference is not None and "reference" not in self.objective.needs:
            raise ValueError(
                f"reference: objective {name!r} compares with none; set objective.kl, or leave it"
                " out"
            )
        return self

    @model_validator(mode="after")
    def _critics_settings_where_there_is_one(self) -> Self:
        given = self.optim.value_lr is not None or self.optim.value_warmup_steps
        if given and "value" not in self.objective.needs:
            name = "value_warmup_steps" if self.optim.value_lr is None else "value_lr"
            raise ValueError(
                f"optim.{name}: objective.advantage = {self.objective.advantage!r} has no value"
                " head; leave it out, or set objective.advantage = 'gae'"
            )
        return self

    @model_validator(mode="after")
    def _engine_returns_its_routes(self) -> Self:
        if self.fsdp.routing == "r3":
            self.vllm = self.vllm.model_copy(update={"routed_experts": True})
            self.proxy = self.proxy.model_copy(update={"routed_experts": True})
        return self

    @model_validator(mode="after")
    def _engine_can_sleep(self) -> Self:
        if self.gpus.share:
            self.vllm, self.proxy = with_sleep(self.vllm, self.proxy)
        return self

    @model_validator(mode="after")
    def _attached_engines_are_all(self) -> Self:
        vllm = self.vllm
        if not vllm.urls:
            return self
        if vllm.port is not None:
            raise ValueError(
                "vllm.port is of a vLLM that is started here, and vllm.urls names servers that run"
                " already: leave one of them out"
            )
        if self.push.engines:
            raise ValueError(
                "push.engines are beside a vLLM that is started here, and vllm.urls names servers"
                " that run already: name all of them in vllm.urls"
            )
        for name in ("share", "vllm"):
            if getattr(self.gpus, name):
                raise ValueError(
                    f"gpus.{name}: vllm.urls names servers that run already, and where they run is"
                    " not decided here: leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _engines_are_told_apart(self) -> Self:
        if len(set(self.engine_urls)) < len(self.engine_urls):
            if self.vllm.urls:
                raise ValueError("vllm.urls: names an engine twice: leave it out")
            raise ValueError("push.engines: names an engine twice, or our own vLLM: leave it out")
        if self.push.engines and self.gpus.share:
            raise ValueError(
                "push.engines: with gpus.share vLLM sleeps while the ranks work, and engines of"
                " other hands do not; leave them out, or set gpus.share = false"
            )
        return self

    @model_validator(mode="after")
    def _every_version_can_be_evaluated(self) -> Self:
        every = self.checkpoint.steps_between
        if self.promotion.gate != "none" and every != 1:
            raise ValueError(
                f"promotion.gate = {self.promotion.gate!r}: a version that can be promoted has a"
                " checkpoint of its own; leave out checkpoint.every_s, and set"
                " checkpoint.every_steps = 1"
            )
        return self

    @model_validator(mode="after")
    def _versions_are_served_side_by_side(self) -> Self:
        rolls, tries = self.push.rollout == "rolling", self.promotion.gate == "canary"
        if rolls and len(self.engine_urls) < 2:
            raise ValueError(
                "push.rollout = 'rolling': there is one engine, and nobody takes its calls"
                " meanwhile; name further ones (push.engines, or vllm.urls), or leave it out"
            )
        if (rolls or tries) and self.push.kv_cache == "keep":
            name = "push.rollout = 'rolling'" if rolls else "promotion.gate = 'canary'"
            raise ValueError(
                f"push.kv_cache = 'keep': with {name} engines have different versions, and a call"
                " does not know which one's cache it will read; set push.kv_cache = 'recompute'"
            )
        return self

    @model_validator(mode="after")
    def _engine_takes_transport(self) -> Self:
        transport = self.push.transport
        if self.push.kv_cache == "keep" and self.gpus.share:
            raise ValueError(
                "push.kv_cache = 'keep': with gpus.share vLLM sleeps, and its cache with it; set"
                " push.kv_cache = 'recompute'"
            )
        if transport not in ("auto", "files", "ipc") and self.gpus.share:
            raise ValueError(
                f"push.transport = {transport!r}: with gpus.share vLLM sleeps, and is woken with"
                " files; set push.transport = 'files', or 'ipc'"
            )
        if self.vllm.device == "cpu":  # auto: `check_transport`, where the machine is known
            check_transport(transport, engine_on_gpu=False)
        if transport == "ipc" and (self.vllm.urls or self.push.engines):
            raise ValueError(
                "push.transport = 'ipc': GPUs of servers that others started (vllm.urls,"
                " push.engines) are not known here; set push.transport = 'nccl', or 'files'"
            )
        if transport == "nccl_m2n" and self.fsdp.lora is not None:
            raise ValueError(
                "push.transport = 'nccl_m2n' sends shards as they are, and [fsdp.lora] is served as"
                " an adapter or merged; set push.transport = 'auto'"
            )
        if transport == "nccl_m2n" and len(self.engine_urls) > 1:
            raise ValueError(
                "push.transport = 'nccl_m2n': all ranks send to one server together, and"
                f" {len(self.engine_urls)} are named; set push.transport = 'nccl'"
            )
        return self

    @model_validator(mode="after")
    def _engine_serves_adapter(self) -> Self:
        reason = merged_reason(self)
        if self.push.lora == "adapter" and reason is not None:
            raise ValueError(f"push.lora = 'adapter': {reason}; set push.lora = 'auto'")
        changes: dict[str, Any] = {"adapter": None}
        if self.fsdp.lora is not None and reason is None:
            folder = self.state_dir / "run" / "adapter"
            changes = {"adapter": folder, "adapter_rank": self.fsdp.lora.rank}
        self.vllm = self.vllm.model_copy(update=changes)
        return self

    @model_validator(mode="after")
    def _candidates_have_a_place(self) -> Self:
        by_name = self.promotion.gate == "canary" and len(self.engine_urls) < 2
        if by_name and (reason := self._why_no_second_adapter()) is not None:
            raise ValueError(
                "promotion.gate = 'canary': a candidate is served beside the promoted version, and"
                f" there is one engine, which serves no second adapter ({reason}); name a further"
                " one (push.engines, or vllm.urls), train adapters ([fsdp.lora]), or set"
                " promotion.gate = 'held_out'"
            )
        self.vllm = self.vllm.model_copy(update={"candidates": by_name})
        return self

    def _why_no_second_adapter(self) -> str | None:
        if self.vllm.urls:
            return "vllm.urls: others start it"
        if self.gpus.share:
            return "gpus.share: it sleeps while the ranks train"
        return merged_reason(self)

    @model_validator(mode="after")
    def _proxy_is_ours(self) -> Self:
        changes: dict[str, Any] = {"upstream": ",".join(self.engine_urls)}
        if "store" not in self.proxy.model_fields_set:
            changes["store"] = SecretUrl(f"sqlite:///{self.state_dir}/store.db")
        if "log_format" not in self.proxy.model_fields_set:
            changes["log_format"] = self.log_format
        self.proxy = self.proxy.model_copy(update=changes)
        return self

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Of all that serve the policy, our own vLLM first."""
        return self.vllm.urls or (self.vllm.url, *self.push.engines)

    @property
    def url(self) -> str:
        """The proxy's base URL."""
        if self.proxy_url is not None:
            return self.proxy_url
        host = f"[{self.proxy.host}]" if ":" in self.proxy.host else self.proxy.host
        return f"http://{host}:{self.proxy.port}"

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.state_dir / "checkpoints"

    @property
    def reference_folder(self) -> Path:
        return self.reference or self.model

    @property
    def needs_reference_model(self) -> bool:
        """A second model beside the policy. The base under adapters is one that costs nothing,
        where it is the one asked for."""
        own_base = self.fsdp.lora is not None and self.reference is None
        return "reference" in self.objective.needs and not own_base

    @property
    def tokens_of_a_rank(self) -> int:
        """Of a micro-batch, at most: ranks may share one."""
        return -(-self.batches.tokens_per_micro_batch // self.fsdp.context_ranks)

    @property
    def rollouts_of_batch(self) -> int:
        """That are opened for one step."""
        return self.batches.groups * (self.batches.group_size + self.data.over_sample)

    @property
    def refills(self) -> bool:
        """Whether groups of equal rewards are replaced within a batch (DAPO, arXiv 2503.14476)."""
        if self.data.refill is None:
            return self.objective.preset == "dapo"
        return self.data.refill

    def step_share(self, groups_trained: float) -> float:
        """How much of a whole step a batch is of which so many groups have a turn to train."""
        if not self.optim.scale_by_groups:
            return 1.0
        return min(1.0, groups_trained / self.batches.groups)

    def with_changes(self, **changes: object) -> TrainerSettings:
        """A copy with other values for some fields, and what follows from them elsewhere."""
        made = self.model_copy(update=changes)
        for rule in TrainerSettings.__pydantic_decorators__.model_validators.values():
            if rule.info.mode == "after":
                rule.func(made)
        return made

    def stored(self) -> dict[str, Any]:
        """The resolved settings as JSON, secrets masked: what a step is recorded with."""
        # Not at the top: commands that only read settings need no torch.
        from tracegrad_trainer.engine.distributed import resolved_dtypes

        resolved: dict[str, Any] = self.model_dump(mode="json")
        resolved["fsdp"] |= resolved_dtypes(self.fsdp)
        return resolved


def merged_reason(settings: TrainerSettings) -> str | None:
    """Why a push carries the model's whole weights; None: it carries an adapter."""
    if settings.push.lora == "merged":
        return "push.lora = 'merged'"
    reason = why_not_served(
        settings.model,
        settings.fsdp.lora,
        sleep_level=settings.gpus.sleep_level if settings.gpus.share else None,
    )
    transport = settings.push.transport
    if reason is None and settings.fsdp.lora is not None and transport not in ("auto", "files"):
        return f"push.transport = {transport!r} carries whole weights"
    return reason


def with_sleep(
    vllm: VllmSettings, proxy: PushedProxySettings
) -> tuple[VllmSettings, PushedProxySettings]:
    """Both as `gpus.share` needs them, also where it is chosen after these settings were read: an
    engine that sleeps is silent for a whole step, and calls wait for it."""
    for name in ("read_timeout_s", "max_wait_s"):  # of calls that run, and of those that come
        if name not in proxy.model_fields_set:
            proxy = proxy.model_copy(update={name: LONGEST_SHARED_STEP_S})
    return vllm.model_copy(update={"sleep_mode": True}), proxy


def _with_fp8_correction(data: dict[str, Any]) -> dict[str, Any]:
    """Settings in which the weights for what an engine in fp8 samples are of tokens, where the
    preset has them of turns and nothing else was asked for: a turn's mean hides single tokens, and
    8 bits move single tokens (FlashRL and verl correct fp8 by token, too)."""
    objective = data.get("objective", {})
    if not serves_fp8(data["vllm"]) or not isinstance(objective, dict):
        return data
    preset = PRESETS.get(objective.get("preset", "grpo"), {})
    kind = objective.get("correction", preset.get("correction"))
    if kind in WEIGHTS and preset.get("correction_level") == "turn":
        objective = {"correction_level": "token"} | objective
    return data | {"objective": objective}
