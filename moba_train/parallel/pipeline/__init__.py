"""Pipeline parallelism: each rank of a pipeline has a part of the layers."""
