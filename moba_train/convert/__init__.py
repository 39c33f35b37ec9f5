"""Hugging Face models (Llama, Qwen2, Qwen3, SmolLM2) in and out, a tensor at a time.

hf_import           a Hugging Face folder as a checkpoint
hf_export           a checkpoint as a Hugging Face folder
hf_weights          Hugging Face weights into a model that exists, sharded or not
hf_config           their config.json and our `model` section
hf_rope             rotary embeddings in both
hf_names            names of parameters in both
initial_weights     `init_from`: the first weights of a run
safetensors_folder  tensors in safetensors files
"""
