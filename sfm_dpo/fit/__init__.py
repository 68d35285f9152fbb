"""The one decision of what a run uses: pairs per device, checkpointed layers and kernel, planned, then measured."""
