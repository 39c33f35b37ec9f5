"""Evaluations that run inside training and from the command line.

loss    mean token loss on held-out text
"""
