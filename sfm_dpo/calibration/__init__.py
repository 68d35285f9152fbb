"""Calibration: how a run computes and how much at a time, compared and measured on its model, pairs and device."""
