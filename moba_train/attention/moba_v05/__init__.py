"""MoBA's serial version: self attention inside segments, then a sublayer of cross attention to earlier segments.

cross  the sublayer's parameters
kind   what a recipe's `kind: moba_v05` names
"""
