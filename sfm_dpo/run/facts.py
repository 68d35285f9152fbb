"""What a run uses and what it has measured: decided once, recorded in data.json and in each of its checkpoints."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Settings:
    """How a step is split and computed. The weights do not depend on it, except for rounding."""

    micro_batch: int  # pairs per device
    accumulation_steps: int
    checkpointed_layers: int
    flash_attention: str = "fa2"  # fa2, fa3 or fa4
    packed: bool = True
    prefix_sharing: bool = True
    memory: dict[str, Any] = field(default_factory=dict)  # memory/planner.py's Candidate, if memory has decided


@dataclass(frozen=True)
class Calibration:
    """What a start has measured (fit/calibration.py)."""

    # Nats: how far a log-prob differs between batch shapes, the largest mean over calibration.WINDOW tokens
    noise: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)  # by path and kernel: largest difference over noise
    kernels: dict[str, float] = field(default_factory=dict)  # milliseconds of a micro-batch, if several were compared
    planned_bytes: int | None = None  # of the largest micro-batch and the states of training, on each device
    measured_bytes: int | None = None
    milliseconds: float | None = None  # of an average micro-batch
    hours: float | None = None  # of training, without communication, evaluation and saves
    reference_hours: float | None = None
    tokens_per_second: float | None = None  # of a device
    mfu: float | None = None
    seconds: float = 0.0  # that calibration took


@dataclass(frozen=True)
class RunFacts:
    """Everything about a run that its configuration does not say."""

    models: dict[str, str] = field(default_factory=dict)  # by field: commit on the Hub, or hash of the folder
    world_size: int = 0
    launch: str = ""  # ZeRO-2, ZeRO-3, FSDP2 or `whole weights`
    counts: dict[str, Any] = field(default_factory=dict)  # of rows and pairs (Pairs.as_dict)
    train_tokens: str = ""  # hash of the token ids
    template_date: str | None = None  # which the chat template prints as today's
    order: list[str] = field(default_factory=list)  # hash of each epoch's order of the pairs
    order_version: int = 0
    is_balanced: bool = False  # a mixture of experts whose balancing loss depends on the micro-batch
    settings: Settings | None = None
    calibration: Calibration = field(default_factory=Calibration)
    reference: dict[str, Any] = field(default_factory=dict)  # by split: key of its reference cache, and its parts

    def as_dict(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        return facts.pop("counts") | facts

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> Self:
        """The facts in data.json or complete.json, of this version or another."""
        facts = read_record(cls, recorded) or cls()
        settings = read_record(Settings, recorded.get("settings"))
        calibration = read_record(Calibration, recorded.get("calibration"))
        return dataclasses.replace(facts, settings=settings, calibration=calibration or Calibration())


def read_record(kind: Any, recorded: Any) -> Any:
    """A dataclass as another version may have recorded it: unknown keys are ignored, and missing or null ones take
    their defaults. None if a value without a default is missing."""
    known = recorded if isinstance(recorded, dict) else {}
    values = {f.name: known[f.name] for f in dataclasses.fields(kind) if known.get(f.name) is not None}
    try:
        return kind(**values)
    except TypeError:
        return None
