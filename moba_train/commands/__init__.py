"""The longer commands of `moba-train`; cli.py makes commands of their functions and has the short ones itself.

evaluation  what uses a trained model: eval, lm-eval, profile-spans, generate
launch      `launch`: one recipe on any number of nodes
plan        `plan --nodes`: the best layouts
shared      arguments, parsers and the group of commands, also of `moba-data`
"""
