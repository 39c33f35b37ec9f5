"""Checkpoints: saved in the background, published atomically, verified, loaded on any layout; Hugging Face in and out.

run                 the checkpoints of one run: saved, resumed from, gone back to
checkpointer        saving one in the background
planned             its tensors written by DCP, planned once for all saves
together            the ranks of a save, and their errors
state               which tensors a run consists of
publish             how a checkpoint becomes visible, and how one is found again
manifest            sizes and hashes of its files
index               DCP's index, read without trust
retention           which checkpoints stay
load                into tensors that exist, on any layout
recipe              the recipe that training wrote into it
initial             `init_from`
hf                  Hugging Face weights into a model that exists
hf_import           a Hugging Face folder as a checkpoint
hf_export           a checkpoint as a Hugging Face folder
hf_config           their config.json and our `model` section
hf_rope             rotary embeddings in both
hf_names            names of parameters in both
safetensors_folder  tensors in safetensors files
"""
