"""What a run uses and what it has measured: decided once, recorded in data.json and in each of its checkpoints."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class ForwardPath:
    """How a batch is computed (calibration/choose_path.py). The weights do not depend on it, except for rounding."""

    packed: bool
    prefix_sharing: bool
    kernel: str  # of packed attention on a GPU: fa2, fa3 or fa4


@dataclass(frozen=True)
class MicroBatch:
    """How much is computed at a time (calibration/choose_micro_batch.py). The weights depend on it by rounding alone,
    except where the loss compares the pairs of a micro-batch (memory/asked.py)."""

    pairs: int  # per device
    checkpointed_layers: int

    def count_accumulation(self, global_batch: int, ranks: int) -> int:
        """Micro-batches of each rank in an optimizer step."""
        return global_batch // (self.pairs * ranks)


@dataclass(frozen=True)
class Calibration:
    """What a start has measured (calibration/)."""

    # Nats: how far a log-prob differs between batch shapes, the largest mean over choose_path.WINDOW tokens
    noise: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)  # by path and kernel: largest difference over noise
    kernels: dict[str, float] = field(default_factory=dict)  # milliseconds of a micro-batch, if several were compared
    planned_bytes: int | None = None  # of the largest micro-batch and the states of training, on each device
    measured_bytes: int | None = None
    smaller: str | None = None  # options that take less memory; empty: none do; None: memory decided nothing
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
    launch: str = ""  # a name in LAUNCHES (common/distributed.py), or `whole weights`
    counts: dict[str, Any] = field(default_factory=dict)  # of rows and pairs (Pairs.as_dict)
    train_tokens: str = ""  # hash of the token ids
    template_date: str | None = None  # which the chat template prints as today's
    order: list[str] = field(default_factory=list)  # hash of each epoch's order of the pairs
    path: ForwardPath | None = None  # None until it is chosen
    micro_batch: MicroBatch | None = None
    calibration: Calibration = field(default_factory=Calibration)
    reference: dict[str, Any] = field(default_factory=dict)  # by split: key of its reference cache, and its parts

    def as_dict(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        return facts.pop("counts") | facts

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> Self:
        """The facts in data.json or complete.json, of this version or another."""
        recorded = recorded | _read_settings(recorded.get("settings"), recorded.get("calibration"))
        parts = {"path": ForwardPath, "micro_batch": MicroBatch, "calibration": Calibration}
        read = {name: read_record(kind, recorded.get(name)) for name, kind in parts.items()}
        facts = read_record(cls, recorded) or cls()
        return dataclasses.replace(facts, **read | {"calibration": read["calibration"] or Calibration()})


def _read_settings(settings: Any, calibration: Any) -> dict[str, Any]:
    """Path, micro-batch and calibration in the form of today, from the `settings` that version 0.3 recorded."""
    if not isinstance(settings, dict):
        return {}
    memory = settings.get("memory") or {}
    evidence = {"smaller": memory.get("smaller") or "", "planned_bytes": memory.get("bytes")} if memory else {}
    return {
        "path": settings | {"kernel": settings.get("flash_attention")},
        "micro_batch": settings | {"pairs": settings.get("micro_batch")},
        "calibration": evidence | {k: v for k, v in (calibration or {}).items() if v is not None},
    }


def read_record(kind: Any, recorded: Any) -> Any:
    """A dataclass as another version may have recorded it: unknown keys are ignored, and missing or null ones take
    their defaults. None if a value without a default is missing."""
    known = recorded if isinstance(recorded, dict) else {}
    values = {f.name: known[f.name] for f in dataclasses.fields(kind) if known.get(f.name) is not None}
    try:
        return kind(**values)
    except TypeError:
        return None
