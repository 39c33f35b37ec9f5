"""vLLM plugin: runs models that moba_train exported with the attention of each layer that config.json names."""


def register() -> None:
    """Register the backend and give layers theirs. vLLM calls this in each of its processes, maybe more than once."""
    # Here, as the rest of the package but for `layers` and `paged` needs vLLM.
    from moba_vllm.hook import register_backend_and_hook

    register_backend_and_hook()
