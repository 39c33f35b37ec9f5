"""Import and export of Hugging Face models (Llama, Qwen2, Qwen3, SmolLM2), a tensor at a time; older checkpoints.

hf_import           a Hugging Face folder to a checkpoint
hf_export           a checkpoint to a Hugging Face folder
hf_tokenizer        the tokenizer of an export, as transformers loads it
sentencepiece_json  a sentencepiece model as tokenizer.json
new_folder          an output folder, left as it was when a conversion fails
folder_contents     what a conversion wrote, for the terminal
hf_weights          Hugging Face weights into a model that exists, sharded or not
hf_config           config.json and our `model` section
hf_rope             rotary embeddings of config.json and of `model.rope`
hf_names            parameter names of Hugging Face
initial_weights     `init_from`: the first weights of a run
safetensors_folder  tensors in safetensors files
older_checkpoints   checkpoints of the format before into those of this one
"""
