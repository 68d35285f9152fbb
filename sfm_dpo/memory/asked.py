"""What a configuration asks for of how a run computes, and what it leaves to measurement."""

import logging
from dataclasses import dataclass

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.checks import SORTING_LOSSES
from sfm_dpo.config.fields import Config
from sfm_dpo.model.loading import balancing_coefficient, load_model_config, meta_model
from sfm_dpo.model.packing import why_not_packed, why_not_shared
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.run.start import NEW, Before

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What a run must use, and what it tries first; None: what is measured decides."""

    pairs: int | None  # in a micro-batch, per device
    layers: int | None  # checkpointed
    kernel: str | None  # fa2, fa3 or fa4
    padding_free: bool | None
    prefix_sharing: bool | None
    can_pack: bool  # as asked or, unasked, by the declared types of the models
    can_share: bool

    def allows(self, path: ForwardPath) -> bool:
        """Whether `path`, which a resumed run has used, is what is asked for."""
        given = (self.padding_free, self.prefix_sharing, self.kernel)
        used = (path.packed, path.prefix_sharing, path.kernel)
        return all(value in (None, other) for value, other in zip(given, used, strict=True))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to memory."""
        return self.pairs is not None and self.layers is not None


def read_asked(config: Config, model_config: PretrainedConfig, before: Before = NEW) -> Asked:
    """What a configuration asks for; a resumed run whose loss depends on the micro-batch keeps that of the run before.
    Raises UserError for what the models or the loss do not allow."""
    args = config.train
    pairs = args.per_device_train_batch_size
    padding_free = args.padding_free
    if SORTING_LOSSES & {*args.loss_type}:
        pairs = args.global_batch_size
    was = before.facts
    if balancing_coefficient(args.router_aux_loss_coef, model_config) and was.micro_batch and was.path:
        kept = [("per_device_train_batch_size", pairs, was.micro_batch.pairs)]
        kept += [("padding_free", padding_free, was.path.packed)]  # decides which pairs share a micro-batch
        for name, now, then in kept:
            if now not in (None, then):
                difference = f"{before.checkpoint} was written with {then}: another balancing loss"
                raise UserError(f"{name} {now}: {difference}; set {name}: {then}, or use another output_dir")
        pairs = was.micro_batch.pairs
        padding_free = was.path.packed
    models = [meta_model(model_config)]
    if args.ref_model_name_or_path:
        models.append(meta_model(load_model_config(config.reference)))
    can_pack = _decide("padding_free", padding_free, [why_not_packed(model) for model in models])
    obstacles = [why_not_shared(model, can_pack, args.router_aux_loss_coef) for model in models]
    can_share = _decide("prefix_sharing", args.prefix_sharing, obstacles)
    kernel = None if args.flash_attention == "auto" else args.flash_attention
    layers = _read_layers(config, model_config)
    return Asked(pairs, layers, kernel, padding_free, args.prefix_sharing, can_pack, can_share)


def _decide(name: str, asked: bool | None, obstacles: list[str | None]) -> bool:
    obstacle = next(filter(None, obstacles), None)
    if asked and obstacle:
        raise UserError(f"{name} True: {obstacle}; set {name}: false")
    if asked is None and obstacle:
        log.info(f"{name} is off: {obstacle}")
    return asked is not False and not obstacle


def _read_layers(config: Config, model_config: PretrainedConfig) -> int | None:
    """How many layers are checkpointed; None if memory decides."""
    args = config.train
    layers = model_config.get_text_config().num_hidden_layers
    count = args.checkpointed_layers
    if count is not None and count > layers:
        raise UserError(f"checkpointed_layers {count}: the model has {layers}; give at most {layers}")
    if args.gradient_checkpointing is False:
        count = 0
    elif args.gradient_checkpointing and count is None:
        count = layers
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)].supports_gradient_checkpointing:
        return count
    if count:
        raise UserError(f"gradient_checkpointing True: {model_config.model_type} has none; remove the field")
    return 0
