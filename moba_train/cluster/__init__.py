"""How a recipe is started on several nodes.

job         what every scheduler needs to know
commands    the command lines for torchrun and Slurm
kubernetes  the manifests of a JobSet and of a TrainJob
"""
