"""Replay: what lies before the first perturbed layer is not computed twice."""
