"""Evaluations that look into sparse attention: gates, the reach of gradients, needles against noise."""
