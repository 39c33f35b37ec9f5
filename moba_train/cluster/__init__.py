"""How a recipe is started on a cluster: lines for torchrun and Slurm, manifests for Kubernetes."""
