"""vLLM plugin: runs models that moba_train exported with the attention of each layer that config.json names."""


def register() -> None:
    """Register the backend and give layers theirs. vLLM calls this in each of its processes, maybe more than once."""
    # Here, as `layers` and `paged` can be imported without vLLM.
    from moba_vllm.hook import register_backend_and_hook

    register_backend_and_hook()
