"""Evaluations of sparse attention: selections of gates, reach of gradients, needles against noise."""
