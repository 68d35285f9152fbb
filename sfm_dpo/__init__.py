"""DPO post-training: TRL's own flags, made to work together under DeepSpeed ZeRO-2."""
